"""What `nsa-harness schema` prints against what is written, by a validator that is not ours."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bisect_samples import SAMPLES
from documents import rows, words
from jsonschema import Draft202012Validator
from render_samples import DEADLOCK, FAILED, MIXED, PASSED
from test_render_attach import ROWS
from test_render_terminal import PROGRESS, SKIP, SPEC

from nsa_harness.cli.main import run_command_line
from nsa_harness.cli.text import command_events
from nsa_harness.commands.judge import judge_evidence
from nsa_harness.render.documents.report_json import OUTCOME_DETAIL, outcome_values, to_json
from nsa_harness.render.documents.schemas import Document, json_schema
from nsa_harness.render.events import SCHEMA, Events
from nsa_harness.render.experiments.bisect_json import answer_event, bisect_json, probe_event
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.planning import LaunchPlan
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.redaction import Redaction

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "render"


@cache
def validator(document: Document) -> Draft202012Validator:
    schema = json_schema(document)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def mistakes(document: Document, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in validator(document).iter_errors(value)]


def stored(pattern: str) -> list[Path]:
    return [path for path in sorted(GOLDEN.glob(pattern)) if "hostile" not in path.name]


@pytest.mark.parametrize("file", [*stored("*.report.json"), ROOT / "reports/sample/report.json"], ids=lambda p: p.name)
def test_every_report_is_as_its_schema_says(file: Path) -> None:
    assert mistakes(Document.REPORT, json.loads(file.read_text())) == []


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "hostile"])
def test_every_bisection_is_as_its_schema_says(name: str) -> None:
    assert mistakes(Document.BISECT, json.loads(bisect_json(SAMPLES[name]))) == []


def test_what_was_judged_of_frozen_evidence_is_as_the_schema_says() -> None:
    from nsa_harness.core.evidence.evidence import Evidence

    with gzip.open(ROOT / "tests/frozen/evidence.jsonl.gz", "rt", encoding="utf-8") as lines:
        kept = [json.loads(line) for number, line in enumerate(lines) if number % 40 == 0]
    outcomes = []
    for one in kept:
        evidence = type_adapter(Evidence).validate_python(one)
        spec = replace(SPEC, ranks=evidence.world_size)
        judged = judge_evidence(
            spec, evidence, attempt=1, directory="a", artifacts=(), metrics=evidence.metrics, repeat=""
        )
        outcomes.append(judged)
    assert len({one.verdict.cause for one in outcomes}) > 5
    assert mistakes(Document.REPORT, json.loads(to_json(replace(MIXED, outcomes=tuple(outcomes))))) == []


def told(tell: Callable[[Listener], None]) -> dict[str, Any]:
    stream = io.StringIO()
    tell(Events(stream, "20261121T101500-3f2a", lambda: 1.5))
    return dict(json.loads(stream.getvalue()))


def events() -> Iterator[dict[str, Any]]:
    """One of each kind, as it is written."""
    for file in (GOLDEN / "events.jsonl", ROOT / "reports/sample/events.jsonl"):
        yield from map(json.loads, file.read_text().splitlines())
    yield told(lambda one: one.on_plan(MIXED.machine, (SPEC, SKIP)))
    yield told(lambda one: one.on_launch(SPEC))
    yield told(lambda one: one.on_phase("a", "step 3", PROGRESS))
    yield told(lambda one: one.on_first_snapshot("a", ROWS))
    yield told(lambda one: one.on_stall("a", "text"))
    yield told(lambda one: one.on_progress_again("a", "text"))
    yield told(lambda one: one.on_done(MIXED, Path("reports/run")))
    for outcome in (PASSED, FAILED, DEADLOCK):
        yield told(lambda one, outcome=outcome: one.on_outcome(outcome, Path("reports/run")))  # type: ignore[misc]
    yield from map(json.loads, command_events(LaunchPlan(specs=(SPEC, SKIP), notes=()), Redaction()))
    search = SAMPLES["flaky"]
    for event in (probe_event(search.subject, search.probes[0]), answer_event(search, "reports/run")):
        yield json.loads(json.dumps({"schema": SCHEMA, **event, "t_s": None, "run_id": "r"}))


def test_every_event_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["report", "no-such-run", "--json"]) != 0
    every = [*events(), json.loads(capsys.readouterr().out)]
    assert {one["event"] for one in every} == {
        "plan", "launch", "phase", "look", "suspect", "released", "outcome", "done", "probe", "error",
    }  # fmt: skip
    assert {one["event"]: found for one in every if (found := mistakes(Document.EVENTS, one))} == {}


def changed(value: Any, path: str, to: Any) -> Any:
    """A copy with another value at that path of keys and numbers."""
    value = json.loads(json.dumps(value))
    *before, last = path.split(".")
    at = value
    for key in before:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[last] = to
    return value


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("schema", 2),
        ("surprise", 1),
        ("outcomes.1.verdict", "SLOW"),
        ("outcomes.1.kind", "stuck"),
        ("outcomes.1.cause", "no_such_cause"),
        ("outcomes.1.phase", "napping"),
        ("outcomes.1.surprise", 1),
        ("outcomes.1.final", None),
        ("outcomes.1.culprit.place.text", "x = 1"),
        ("outcomes.1.findings.0.confidence", 0.42),
        ("outcomes.1.findings.0.code", "no_such_cause"),
        ("outcomes.1.timing.wall_s", "14"),
        ("outcomes.1.last_step.0", "one"),
        ("outcomes.1.detail.standings.0.surprise", 1),
        ("outcomes.1.detail.standings.0.quiet_s", "long"),
        ("outcomes.1.detail.why", 7),
        ("outcomes.1.detail.metrics", {"loss": "no number"}),
    ],
)
def test_what_the_contract_does_not_know_is_refused(path: str, to: Any) -> None:
    report = json.loads(to_json(MIXED))
    assert mistakes(Document.REPORT, report) == []
    assert len(mistakes(Document.REPORT, changed(report, path, to))) == 1


def test_detail_may_grow_but_keeps_what_is_stable_in_it() -> None:
    outcome = outcome_values(DEADLOCK)
    whole = json.loads(to_json(replace(MIXED, outcomes=(DEADLOCK,))))
    assert mistakes(Document.REPORT, changed(whole, "outcomes.0.detail.new_key", 1)) == []
    for key in ("standings", "why"):
        kept = {name: value for name, value in outcome["detail"].items() if name != key}
        assert len(mistakes(Document.REPORT, changed(whole, "outcomes.0.detail", kept))) == 1
    known = validator(Document.REPORT).schema["$defs"]["OutcomeDetail"]["properties"]
    assert set(known) == set(OUTCOME_DETAIL)


@pytest.mark.parametrize(
    ("path", "to"),
    [("answer.kind", "maybe"), ("probes.0.counts_as", "ugly"), ("probes.0.verdict", "OK"), ("answer.surprise", 1)],
)
def test_a_bisection_of_another_form_is_refused(path: str, to: Any) -> None:
    assert len(mistakes(Document.BISECT, changed(json.loads(bisect_json(SAMPLES["flaky"])), path, to))) == 1


@pytest.mark.parametrize(("path", "to"), [("event", "nap"), ("surprise", 1), ("phase", 3), ("ranks.0.step", "one")])
def test_an_event_of_another_form_is_refused(path: str, to: Any) -> None:
    event = told(lambda one: one.on_phase("a", "step 3", PROGRESS))
    assert mistakes(Document.EVENTS, event) == []
    assert mistakes(Document.EVENTS, changed(event, path, to)) != []


def test_each_schema_names_itself_and_says_something_of_every_key() -> None:
    read_by_programs = [one for one in Document if one not in (Document.SCENARIO, Document.PLAN)]
    ids = {document: validator(document).schema["$id"] for document in read_by_programs}
    assert len(set(ids.values())) == 4
    assert all(one.startswith("urn:nsa-harness:") and one.endswith(f":{name}:1") for name, one in ids.items())

    def keys(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            yield from node.get("properties", {}).values()
            node = list(node.values())
        for one in node if isinstance(node, list) else ():
            yield from keys(one)

    for document in ids:
        assert [one for one in keys(validator(document).schema) if not one.get("description")] == []


def test_the_command_prints_them_without_torch() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['nsa-harness', 'schema', 'report']\n"
        "try: runpy.run_module('nsa_harness', run_name='__main__')\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json_schema(Document.REPORT)


def test_a_document_without_schema_is_told_with_those_that_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["schema", "reports"]) == 2
    said = capsys.readouterr().err
    assert 'did you mean "report"?' in said
    assert "known: scenario, plan, report, bisect, why, events" in said


def test_the_contract_in_words_has_the_same_keys() -> None:
    def keys(head: str) -> set[str]:
        return {word for row in rows("docs/internals/contracts.md", head, "meaning") for word in words(row[0])}

    report, outcome = json_schema(Document.REPORT), json_schema(Document.REPORT)["$defs"]["StoredOutcome"]
    assert keys("key") == set(report["properties"])
    assert keys("key of an outcome") == set(outcome["properties"])
    bisection = json_schema(Document.BISECT)
    assert keys("key of a bisection") == set(bisection["properties"])
    assert keys("key of its answer") == set(bisection["$defs"]["AnswerEntry"]["properties"])


def test_the_events_in_words_have_the_same_keys() -> None:
    forms = json_schema(Document.EVENTS)["$defs"]
    head = {"schema", "event", "t_s", "run_id", "scenario"}
    told = {
        words(row[0])[0]: set(words(row[2].partition(":")[0]))
        for row in rows("docs/internals/contracts.md", "event", "when", "more keys")
    }
    assert len(told) >= 9
    assert {name: keys - {"t_s", "run_id"} for name, keys in told.items()} == {
        name: set(forms[name]["properties"]) - head for name in told
    }
