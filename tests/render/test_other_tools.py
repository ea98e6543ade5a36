"""SARIF and the trace, each read by something that is not ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chrometrace import TraceEvent, TraceEventType
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif
from render_samples import DEADLOCK, ERRED, LIVELOCK, MIXED, QUIET
from test_render_documents import REPORTS

from nsa_harness.commands.judge import judge_stored
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.report import Outcome, Place, Report
from nsa_harness.render.documents import documents
from nsa_harness.render.documents.case_reports import junit_xml
from nsa_harness.render.documents.code_hosts import sarif
from nsa_harness.render.documents.report_json import from_json, to_json
from nsa_harness.render.documents.trace import trace_json
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.rundir import RunDir

sys.path.insert(0, str(Path(__file__).parents[1] / "supervisor"))
from attempts import unpack

# SARIF.


def results(report: Report, checkout: str = "") -> list[dict[str, Any]]:
    run = json.loads(sarif(report, checkout))["runs"][0]
    return list(run["results"])


def line_of(step: dict[str, Any]) -> int:
    return int(step["location"]["physicalLocation"]["region"]["startLine"])


@pytest.mark.parametrize("checkout", ["", "/home/ada"])
@pytest.mark.parametrize("report", REPORTS)
def test_sarif_is_what_the_standard_says(report: str, checkout: str) -> None:
    read = Sarif.model_validate_json(sarif(REPORTS[report], checkout))
    rules = [rule.id for rule in read.runs[0].tool.driver.rules or []]
    assert [rules[one.ruleIndex] for one in read.runs[0].results or []] == [
        one.ruleId for one in read.runs[0].results or []
    ]


def test_a_finding_has_its_line_its_other_ranks_and_the_way_there() -> None:
    hang = results(replace(QUIET, outcomes=(DEADLOCK,)))[0]
    assert (hang["ruleId"], hang["level"]) == ("rank_conditional_collective", "error")
    assert hang["message"]["text"].startswith("HANG branch_sel_only: Rank 1 skipped all_reduce #14")
    (here,) = hang["locations"]
    assert here["physicalLocation"]["artifactLocation"] == {"uri": "nsa/model.py", "uriBaseId": "SRCROOT"}
    assert here["physicalLocation"]["region"] == {"startLine": 212}
    assert here["physicalLocation"]["contextRegion"]["startLine"] == 211
    (other,) = hang["relatedLocations"]
    assert (other["message"]["text"], other["physicalLocation"]["region"]["startLine"]) == ("rank 1", 8)
    flows = hang["codeFlows"][0]["threadFlows"]
    lines = [
        [step["location"]["physicalLocation"]["region"]["startLine"] for step in one["locations"]] for one in flows
    ]
    assert dict(zip([one["id"] for one in flows], lines, strict=True)) == {"rank 1": [41, 8], "rank 0": [36, 212]}
    stacks = [[line_of(frame) for frame in one["frames"]] for one in hang["stacks"]]
    assert stacks == [[8, 41], [212, 36]]


def test_files_of_the_repository_are_named_from_there_and_others_are_not() -> None:
    def uri(file: str) -> dict[str, str]:
        place = Place(file=file, line=3)
        found = replace(DEADLOCK.findings[1], place=place)
        outcome = replace(DEADLOCK, findings=(found,), stacks=())
        return dict(
            results(replace(QUIET, outcomes=(outcome,)), "/home/ada/repo")[1]["locations"][0]["physicalLocation"][
                "artifactLocation"
            ]
        )

    assert uri("/home/ada/repo/my train.py") == {"uri": "my%20train.py", "uriBaseId": "SRCROOT"}
    assert uri("/home/ada/repo2/train.py") == {"uri": "file:///home/ada/repo2/train.py"}
    run = json.loads(sarif(QUIET, "/home/ada/repo"))["runs"][0]
    assert run["originalUriBaseIds"] == {"SRCROOT": {"uri": "file:///home/ada/repo/"}}


def print_of(outcome: Outcome) -> str:
    prints = results(replace(QUIET, outcomes=(outcome,)))[0]["partialFingerprints"]
    return str(prints["nsaHarnessFinding/v1"])


def test_a_fingerprint_outlives_a_moved_line_another_rank_and_another_run() -> None:
    assert DEADLOCK.culprit is not None
    assert DEADLOCK.culprit.place is not None
    moved = replace(DEADLOCK.culprit, ranks=(3,), place=replace(DEADLOCK.culprit.place, line=299))
    verdict = replace(DEADLOCK.verdict, summary="rank 3 skipped all_reduce #99")
    again = replace(DEADLOCK, culprit=moved, verdict=verdict, attempt=2)
    assert print_of(again) == print_of(DEADLOCK)
    elsewhere = replace(moved, place=replace(DEADLOCK.culprit.place, function="other"))
    assert print_of(replace(DEADLOCK, culprit=elsewhere)) != print_of(DEADLOCK)
    assert print_of(
        replace(
            DEADLOCK,
            spec=replace(DEADLOCK.spec, scenario="another"),
        )
    ) != print_of(DEADLOCK)


def test_the_level_is_the_severity_and_what_was_announced_is_a_note() -> None:
    def levels(outcome: Outcome) -> list[str]:
        return [one["level"] for one in results(replace(QUIET, outcomes=(outcome,)))]

    assert levels(replace(DEADLOCK, expected=False)) == ["error", "warning"]
    assert levels(replace(DEADLOCK, expected=True))[0] == "note"


def test_a_failure_without_a_finding_is_told_and_an_unjudged_run_is_none() -> None:
    (told,) = results(replace(QUIET, outcomes=(LIVELOCK,)))
    assert told["message"]["text"].startswith("HANG gc_bisect_layers_0_5: Rank 0 burns CPU")
    assert told["locations"][0]["physicalLocation"]["region"]["startLine"] == 9
    run = json.loads(sarif(replace(QUIET, outcomes=(ERRED,))))["runs"][0]
    assert run["results"] == []
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"].startswith("fsdp: ")


def test_every_rule_has_the_whole_row_of_its_cause() -> None:
    rule = json.loads(sarif(MIXED))["runs"][0]["tool"]["driver"]["rules"][0]
    assert rule["id"] == "rank_conditional_collective"
    assert rule["name"] == "RankConditionalCollective"
    assert "one rank skipped a collective" in rule["fullDescription"]["text"].lower()
    assert "**Proven by:**" in rule["help"]["markdown"]
    assert rule["help"]["text"].endswith("nsa-harness explain rank_conditional_collective")


# The documents of a run.


def test_they_are_written_beside_the_others_and_one_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "spec.json").write_text("{}")
    (tmp_path / "a" / "env.json").write_text(json.dumps({"git": {"root": "/home/ada/repo"}}))
    assert documents.write_documents(run, MIXED, PLAYBOOK) == ()
    assert run.sarif.read_text() == sarif(MIXED, "/home/ada/repo")
    assert run.junit.read_text() == junit_xml(MIXED)

    def broken(*_: object) -> str:
        raise ValueError("planted")

    run.junit.unlink()
    monkeypatch.setattr(documents, "sarif", broken)
    (trouble,) = documents.write_documents(run, MIXED, PLAYBOOK)
    assert (trouble.what, trouble.why) == ("report.sarif", "ValueError: planted")
    assert run.junit.is_file()


def test_what_is_made_of_all_attempts_is_linked_and_of_an_empty_file_it_is_said_why(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = tmp_path / QUIET.outcomes[0].dir
    attempt.mkdir(parents=True)
    (attempt / "traces.log").write_text("[rank0]   - MISSING: blocks.0.attn.gate_mlp.bias\n")
    assert documents.write_documents(run, QUIET, PLAYBOOK) == ()
    first = f"{QUIET.outcomes[0].dir} [rank0]   - MISSING: blocks.0.attn.gate_mlp.bias\n"
    assert (run.missing_params.read_text(), run.buckets.read_text()) == (first, "")
    assert (
        "Collected from all attempts:\n\n"
        "- [all_missing_params.txt](all_missing_params.txt): 1 line\n"
        "- [ddp_buckets.txt](ddp_buckets.txt): no run traced DDP's buckets (trace.buckets)\n"
    ) in run.summary.read_text()
    page = run.html.read_text()
    assert '<a href="all_missing_params.txt"><code>all_missing_params.txt</code></a>' in page
    assert '<a href="ddp_buckets.txt"><code>ddp_buckets.txt</code></a>' in page
    read = from_json(run.report.read_text())
    assert [(file.path, file.count, file.absent) for file in read.files] == [
        ("all_missing_params.txt", 1, None),
        ("ddp_buckets.txt", 0, "no run traced DDP's buckets (trace.buckets)"),
    ]


@pytest.mark.parametrize("said", ["[]", "{", '{"git": {"root": 7}}', '{"git": {"root": "../x"}}', '{"git": null}'])
def test_an_environment_that_names_no_repository_names_none(tmp_path: Path, said: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "spec.json").write_text("{}")
    (tmp_path / "a" / "env.json").write_text(said)
    run = RunDir(tmp_path)
    documents.write_documents(run, QUIET, PLAYBOOK)
    assert run.sarif.read_text() == sarif(QUIET, "")


def test_the_same_report_gives_the_same_bytes() -> None:
    stored = from_json(to_json(MIXED))
    assert (sarif(stored), junit_xml(stored)) == (sarif(MIXED), junit_xml(MIXED))


# The trace.


def traced(case: str, folder: Path) -> list[dict[str, Any]]:
    attempt = unpack(case, folder / "train")
    judge_stored(attempt)
    return list(json.loads(attempt.trace.read_text())["traceEvents"])


def foreign(events: list[dict[str, Any]]) -> list[TraceEvent]:
    """As another library reads them; of the ids of arrows it knows nothing."""
    return [TraceEvent.from_dict({key: one[key] for key in one.keys() - {"id", "bp"}}) for one in events]


def named(events: list[dict[str, Any]], what: str) -> dict[int, str]:
    where = "pid" if what == "process_name" else "tid"
    return {one[where]: one["args"]["name"] for one in events if one["name"] == what}


def test_a_hang_on_its_time_line_is_read_by_another_library(tmp_path: Path) -> None:
    events = traced("collective_skipped", tmp_path)
    read = foreign(events)
    kinds = {TraceEventType(one.event_type) for one in read}
    assert kinds == {TraceEventType(kind) for kind in "MXBIsf"}
    assert named(events, "process_name") == {1: "rank 0", 2: "rank 1"}
    threads = named(events, "thread_name")
    assert {"steps", "training thread", "group 0"} <= set(threads.values())
    for one in read:
        if one.event_type == TraceEventType.COMPLETE:
            assert one.duration_us >= 0
            assert one.thread_id in threads


def test_what_had_not_ended_is_open_and_says_so(tmp_path: Path) -> None:
    events = traced("collective_skipped", tmp_path)
    still = [one for one in events if one["ph"] == "B"]
    assert all(one["args"]["unfinished"] is True for one in still)
    inside = [one for one in still if one["cat"] == "call"]
    assert [(one["pid"], one["name"]) for one in inside] == [(1, "all_reduce")]
    assert inside[0]["args"]["place"].endswith("nsa/world.py:38")
    waiting = {(one["pid"], one["name"]) for one in still if one["cat"] == "collective"}
    assert {pid for pid, _ in waiting} == {1, 2}


def test_arrows_join_the_members_of_one_collective_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    events = traced("collective_skipped", tmp_path)
    arrows: dict[int, list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] in "stf":
            arrows.setdefault(one["id"], []).append(one)
    assert len(arrows) > 5
    slices = {(one["pid"], one["tid"], one["ts"]) for one in events if one.get("cat") == "collective"}
    for ends in arrows.values():
        first, *_, last = sorted(ends, key=lambda one: (one["ts"], one["ph"] != "s"))
        assert (first["ph"], last["ph"]) == ("s", "f")
        assert first["pid"] != last["pid"]
        assert first["ts"] <= last["ts"]
        assert all((one["pid"], one["tid"], one["ts"]) in slices for one in ends)
        assert len({(one["name"], one["cat"]) for one in ends}) == 1


def moments(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    yield from ((one["name"], one["ts"]) for one in events if one["ph"] == "I" and one["s"] == "g")


def test_begin_suspicion_and_verdict_stand_on_the_line_in_their_order(tmp_path: Path) -> None:
    told = list(moments(traced("collective_skipped", tmp_path)))
    names = [name for name, _ in told]
    assert names[0] == "attempt 1 of fault_skip_collective starts"
    assert names[1] == "stall: no rank makes progress"
    assert any(name.startswith("HANG: deadlock") for name in names)
    assert [at for _, at in told] == sorted(at for _, at in told)
    assert len(told) == len(set(told))


def test_a_suspicion_that_was_taken_back_is_a_look_alone(tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "train")
    outcome = judge_stored(attempt)
    stored = json.loads(next(attempt.evidence.iterdir()).read_text())
    evidence = type_adapter(Evidence).validate_python(stored)
    early = replace(evidence.samples[0], at_s=1.0)
    events = json.loads(trace_json(replace(evidence, samples=(early, *evidence.samples)), outcome))["traceEvents"]
    assert ("snapshot: unseen", 1e6) in [(one["name"], one["ts"]) for one in events]
    (stall_us,) = (at for name, at in moments(events) if name.startswith("stall"))
    assert stall_us == pytest.approx(evidence.samples[0].at_s * 1e6)


def test_a_run_that_ended_well_has_nothing_open_and_its_steps_in_a_row(tmp_path: Path) -> None:
    events = traced("onestep_passes", tmp_path)
    assert [one for one in events if one["ph"] == "B"] == []
    steps = [one for one in events if one.get("cat") == "step"]
    assert sorted((one["pid"], one["name"]) for one in steps) == [(1, "step 1"), (2, "step 1")]
    assert all(one["dur"] > 0 for one in steps)


def test_a_trace_that_cannot_be_made_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ValueError("planted")

    monkeypatch.setattr("nsa_harness.commands.judge.trace_json", broken)
    outcome = judge_stored(unpack("rank_raises", tmp_path / "train"))
    assert outcome.verdict.cause == "exception"
    assert [(one.what, one.why) for one in outcome.trouble if one.what == "trace.json"] == [
        ("trace.json", "it could not be created: ValueError: planted")
    ]
