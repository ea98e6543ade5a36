"""SUMMARY.md, report.json, junit.xml and report.html as whole documents."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from render_samples import (
    DEADLOCK,
    ERRED,
    FAILED,
    FLAKY_FIRST,
    HEALTHY_PLAN,
    MIXED,
    PASSED,
    QUIET,
    SICK_PLAN,
    SKIPPED,
    hostile,
    judged,
)

from nsa_harness.core.report import UNWATCHED, Finding, HangKind, Outcome, Report, Status
from nsa_harness.errors import StoredRunError
from nsa_harness.render import answer
from nsa_harness.render.documents.case_reports import junit_xml
from nsa_harness.render.documents.html import COPY_SCRIPT, lanes, report_html
from nsa_harness.render.documents.plain_text import prompt_text
from nsa_harness.render.documents.report_json import from_json, to_json
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.sections import Section
from nsa_harness.render.terminal.answer import answer_lines
from nsa_harness.render.text import escaped
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.texts.words import meaning

Golden = Callable[[str, str], None]
REPORTS = {
    "mixed": MIXED,
    "quiet": QUIET,
    "hostile": hostile(),
    "sick_plan": SICK_PLAN,
    "healthy_plan": HEALTHY_PLAN,
    "interrupted": judged(replace(MIXED, interrupted=True, outcomes=(), not_run=("ddp_gloo", "fsdp"))),
}
_FILE = "/home/ada/project/train.py"


def test_every_document_names_a_line_in_the_same_way() -> None:
    assert DEADLOCK.culprit is not None
    place = replace(DEADLOCK.culprit.place or DEADLOCK.stacks[0].frames[0], file=_FILE, line=41)
    stacks = tuple(replace(stack, frames=(place,), around=None) for stack in DEADLOCK.stacks)
    report = judged(
        replace(MIXED, outcomes=(replace(DEADLOCK, culprit=replace(DEADLOCK.culprit, place=place), stacks=stacks),))
    )
    page = re.sub(r'title="[^"]*"', "", report_html(report, PLAYBOOK))
    for text in (page, summary_md(report, PLAYBOOK), junit_xml(report)):
        assert "project/train.py:41" in text
        assert "/home/ada" not in text
    assert f"look at {_FILE}:41" in prompt_text(report)


def test_the_summary_shows_a_stack_that_no_other_rank_shares() -> None:
    """The traceback of a failure, for example, is the only stack of its report."""
    stack = replace(DEADLOCK.stacks[0], around=None)
    text = summary_md(judged(replace(MIXED, outcomes=(replace(DEADLOCK, stacks=(stack,)),))), PLAYBOOK)
    for frame in stack.frames:
        assert f":{frame.line}   {frame.function}" in text


RENDERERS: dict[str, Callable[[Report], str]] = {
    "SUMMARY.md": lambda report: summary_md(report, PLAYBOOK),
    "report.json": to_json,
    "junit.xml": junit_xml,
    "report.html": lambda report: report_html(report, PLAYBOOK),
}


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("document", RENDERERS)
def test_the_whole_document_is_as_recorded(golden: Golden, document: str, report: str) -> None:
    golden(f"{report}.{document}", RENDERERS[document](REPORTS[report]))


@pytest.mark.parametrize("document", RENDERERS)
def test_the_same_report_gives_the_same_bytes(document: str) -> None:
    render = RENDERERS[document]
    assert render(MIXED) == render(from_json(to_json(MIXED)))


@pytest.mark.parametrize("document", ["SUMMARY.md", "report.html"])
def test_no_document_guesses(document: str) -> None:
    text = RENDERERS[document](MIXED).lower()
    assert [word for word in ("possible", "root cause", "seems", "probably") if word in text] == []


def test_the_page_has_a_writer_for_each_kind_of_section() -> None:
    source = files("nsa_harness.render.documents").joinpath("report.html.j2").read_text(encoding="utf-8")
    written = dict(re.findall(r'"(\w+)": (\w+)', source))
    assert written == {kind.__name__: kind.__name__ for kind in get_args(Section)}


def test_of_many_ranks_groups_come_first_and_each_rank_is_folded() -> None:
    standings = tuple(replace(DEADLOCK.rank_statuses[rank % 2], rank=rank) for rank in range(20))
    report = replace(QUIET, outcomes=(replace(DEADLOCK, rank_statuses=standings),))
    text = summary_md(report, PLAYBOOK)
    groups, each = text.split("<details><summary>All 20 ranks</summary>")
    assert "| 0, 2, 4, 6 and 6 more | all_reduce #14 | rank 1 |" in groups
    assert "| 19 ◀ culprit | barrier #14 |" not in groups
    assert "| 19 ◀ culprit | barrier #14 |" in each.split("</details>")[0]
    assert "<summary>All 20 ranks</summary>" in report_html(report, PLAYBOOK)


def test_an_exit_that_nobody_saw_is_not_known_in_every_document() -> None:
    report = replace(QUIET, outcomes=(replace(DEADLOCK, ending_text=UNWATCHED),))
    for document in ("SUMMARY.md", "report.html"):
        text = RENDERERS[document](report)
        assert "not known" in text
        assert "had not exited" not in text


def test_the_first_line_of_the_summary_is_the_verdict_or_the_counts() -> None:
    assert (
        summary_md(MIXED, PLAYBOOK).split("\n")[0]
        == "# 7 runs in 8 attempts: 2 HANG · 2 FAIL · 1 ERROR · 1 SKIP · 1 PASS"
    )
    assert summary_md(QUIET, PLAYBOOK).split("\n")[0] == "# PASS ddp_onestep: 4.6 s"


def test_all_rows_of_a_summary_table_have_as_many_cells_as_its_head() -> None:
    for report in REPORTS.values():
        rows = [line for line in summary_md(report, PLAYBOOK).split("\n") if line.startswith("| ")]
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        if not rows:
            continue
        heads = [index for index, row in enumerate(rows) if re.fullmatch(r"[|: -]+", row)]
        for start, end in zip(heads, [*(head - 1 for head in heads[1:]), len(rows)], strict=True):
            assert set(cells[start - 1 : end]) == {cells[start]}


def test_the_contract_of_report_json_is_complete() -> None:
    stored = json.loads(to_json(MIXED))
    assert list(stored) == ["schema", "run_id", "harness", "machine", "outcomes", "gates", "detail"]
    assert list(stored["machine"]) == ["host", "cpus", "gpus", "torch"]
    expected = [
        "scenario",
        "spec_hash",
        "attempt",
        "final",
        "verdict",
        "kind",
        "cause",
        "summary",
        "expected",
        "flaky",
        "phase",
        "culprit",
        "victims",
        "last_step",
        "exit_codes",
        "findings",
        "trouble",
        "timing",
        "usage",
        "dir",
        "values",
        "detail",
    ]
    assert [list(outcome) for outcome in stored["outcomes"]] == [expected] * len(MIXED.outcomes)
    hang = stored["outcomes"][1]
    assert (hang["verdict"], hang["kind"]) == ("HANG", "deadlock")
    assert list(hang["culprit"]) == ["ranks", "step", "collective", "place"]
    assert list(hang["culprit"]["place"]) == ["file", "line", "function", "module", "layer", "parameter"]
    assert list(hang["findings"][0]) == [
        "code",
        "claim",
        "ranks",
        "place",
        "confidence",
        "proof",
        "advice",
        "left_open",
        "facts",
    ]
    assert hang["exit_codes"] == {"0": None, "1": None}
    assert hang["timing"] == {"launch_s": 2.8, "wall_s": 14.2, "quiet_s": 5.2, "detected_s": 5.2, "teardown_s": 0.4}


def test_a_number_json_cannot_say_is_named_in_the_detail_and_null_in_the_contract() -> None:
    usage = replace(PASSED.usage, tokens_per_s=float("inf"))
    stored = json.loads(to_json(replace(QUIET, outcomes=(replace(FAILED, usage=usage),))))["outcomes"][0]
    assert stored["usage"]["tokens_per_s"] is None
    assert stored["detail"]["metrics"] == {"loss_first": "nan"}
    assert stored["detail"]["vitals"][0]["loss"] == "nan"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=9), values, max_size=2),
    max_leaves=3,
)
st.register_type_strategy(
    Finding,
    st.builds(
        Finding,
        left_open=st.from_type(tuple[str, ...]),
        facts=st.dictionaries(st.text(max_size=9), JSON_VALUES, max_size=2),
    ),
)


def _finite(value: Any) -> Any:
    """The value as the harness can make it: no infinite times. Metrics and losses may be anything."""
    if isinstance(value, Outcome):
        cost = value.cost and replace(value.cost, seconds=1.5, error=0.25, cpu_s=None, cpu_error=0.0)
        vitals = tuple(replace(row, longest_gap_s=None) for row in value.rank_summaries)
        standings = tuple(replace(row, no_progress_s=1.5) for row in value.rank_statuses)
        findings = tuple(replace(finding, confidence=0.5) for finding in value.findings)
        timing = replace(PASSED.timing, wall_s=2.0)
        return replace(
            value,
            rank_summaries=vitals,
            rank_statuses=standings,
            findings=findings,
            timing=timing,
            usage=PASSED.usage,
            cost=cost,
        )
    return replace(value, outcomes=tuple(map(_finite, value.outcomes)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.from_type(Report).map(_finite))
def test_a_stored_report_comes_back_as_it_was(report: Report) -> None:
    # By repr, because nan is not equal to itself.
    assert repr(from_json(to_json(report))) == repr(escaped(report))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.from_type(Report))
def test_every_report_can_be_rendered(report: Report) -> None:
    JUnitXml.fromstring(junit_xml(report).encode())
    json.loads(to_json(report), parse_constant=pytest.fail)
    assert summary_md(report, PLAYBOOK).startswith("# ")
    assert report_html(report, PLAYBOOK).rstrip().endswith("</html>")


@pytest.mark.parametrize("report", [*REPORTS.values(), replace(QUIET, outcomes=(DEADLOCK,))])
def test_a_failure_to_paste_has_its_answer_first_and_is_never_long(report: Report) -> None:
    text = prompt_text(report)
    assert len(text) <= 6_000
    assert "\x1b" not in text
    if report.outcomes and (told := answer.outcomes_in_full(escaped(report))):
        assert text.startswith(f"{told[0][1].verdict.status.value} {told[0][1].spec.scenario}: ")


def test_of_several_failures_the_worst_that_was_not_expected_is_the_one_to_paste() -> None:
    hung = replace(DEADLOCK, expected=False)
    for outcomes in ((ERRED, FAILED, hung), (hung, FAILED, ERRED), (replace(DEADLOCK, expected=True), ERRED, hung)):
        assert prompt_text(replace(MIXED, outcomes=outcomes)).startswith("HANG branch_sel_only: ")
    announced = replace(DEADLOCK, expected=True)
    unforeseen = replace(FAILED, expected=False)
    assert prompt_text(replace(MIXED, outcomes=(announced, unforeseen))).startswith("FAIL gc_baseline_full: ")


def test_a_long_failure_is_cut_at_the_end_of_a_line_and_says_so() -> None:
    deep = replace(DEADLOCK.stacks[0], frames=DEADLOCK.stacks[0].frames * 200)
    text = prompt_text(replace(QUIET, outcomes=(replace(DEADLOCK, stacks=(deep,)),)))
    assert 5_000 < len(text) <= 6_000
    assert text.endswith("[cut here: the rest is in report.json]\n")
    assert answer.sentence(DEADLOCK.verdict.summary) in text


def test_a_failure_to_paste_is_as_recorded(golden: Golden) -> None:
    golden("deadlock.prompt.txt", prompt_text(replace(QUIET, outcomes=(DEADLOCK,))))


def test_a_report_cut_anywhere_is_refused() -> None:
    text = to_json(QUIET).rstrip()
    for end in range(0, len(text), 61):
        with pytest.raises(StoredRunError, match="cut short"):
            from_json(text[:end])


def type_name(value: object) -> str:
    return type(value).__name__


def _paths(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


@pytest.mark.parametrize("intruder", [None, [], {}, "x\x1b[2J", -1, 10**4000, True, [[[]]], {"a": None}], ids=type_name)
def test_a_wrong_value_anywhere_is_refused_or_harmless(intruder: object) -> None:
    text = to_json(replace(MIXED, outcomes=(DEADLOCK,)))
    for path in list(_paths(json.loads(text)))[1:]:
        stored = json.loads(text)
        holder = stored
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = intruder
        try:
            report = from_json(json.dumps(stored))
        except StoredRunError as error:
            shown = str(error)
        else:
            shown = summary_md(report, PLAYBOOK) + junit_xml(report) + report_html(report, PLAYBOOK)
        assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, or cut short"),
        ("[" * 200_000, "not JSON, or cut short"),
        ("[]", "schema: expected 1, got 'list'"),
        ('{"schema": 2}', "schema: expected 1, got 2"),
        ('{"schema": 1}', "outcomes: Field required"),
        ('{"schema": NaN}', "NaN is not a finite number"),
        ('{"schema": 1e999}', "1e999 is not a finite number"),
        ('{"schema": 1, "outcomes": [3]}', "outcomes.0: Input should be an object"),
        ('{"schema": 1, "outcomes": [], "detail": {}}', "run_id: Field required"),
        ('{"schema": 1, "outcomes": [], "detail": {}}', "detail.command: Field required"),
        ('{"schema": 1, "outcomes": [{"detail": {}}]}', "outcomes.0.detail.about: Field required"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(StoredRunError) as caught:
        from_json(text, "runs/a/report.json")
    assert str(caught.value).startswith("runs/a/report.json cannot be read as a report:\n")
    assert message in str(caught.value)
    assert str(caught.value).endswith("nsa-harness report RUN")


def test_junit_fails_where_the_exit_code_does() -> None:
    suite = next(iter(JUnitXml.fromstring(junit_xml(MIXED).encode())))
    marks = {case.name: [type(mark) for mark in case.result] for case in suite}
    assert marks == {
        "ddp_onestep": [],
        "branch_sel_only": [Failure],
        "gc_bisect_layers_0_5": [Failure],
        "gc_baseline_full": [Failure],
        "ddp_nccl": [Skipped],
        "fsdp": [Error],
        "ddp_gloo": [Failure],
    }
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (7, 4, 1, 1)


def test_junit_shows_earlier_attempts_and_the_paths_of_the_proof() -> None:
    suite = next(iter(JUnitXml.fromstring(junit_xml(MIXED).encode())))
    output = {case.name: case.system_out for case in suite}
    assert "attempt 1 (superseded): HANG deadlock: rank 1 skipped" in output["ddp_gloo"]
    assert "attempt 2: FAIL: attempt 1 hung, attempt 2 passed" in output["ddp_gloo"]
    assert "proof: branch_sel_only/dumps/rank1.txt:8" in output["branch_sel_only"]


def test_junit_counts_an_expected_hang_as_in_order_and_an_unexpected_pass_as_failure() -> None:
    outcomes = (replace(DEADLOCK, expected=True), replace(PASSED, expected=False))
    suite = next(iter(JUnitXml.fromstring(junit_xml(replace(MIXED, outcomes=outcomes)).encode())))
    assert [[mark.type for mark in case.result] for case in suite] == [[], ["PASS not expected"]]


def test_junit_names_the_attempt_only_where_two_count() -> None:
    outcomes = (PASSED, replace(PASSED, attempt=2), FAILED)
    suite = next(iter(JUnitXml.fromstring(junit_xml(replace(MIXED, outcomes=outcomes)).encode())))
    assert [case.name for case in suite] == ["ddp_onestep~1", "ddp_onestep~2", "gc_baseline_full"]


class Page(html.parser.HTMLParser):
    """What a browser would load, run or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_network_and_no_script_even_from_a_hostile_report() -> None:
    page, text = Page(), report_html(hostile(), PLAYBOOK)
    page.feed(text.replace(f"<script>{COPY_SCRIPT}</script>", ""))
    assert page.open == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    allowed = base64.b64encode(hashlib.sha256(COPY_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    assert f'content="{policy}"' in text
    assert [address for address in page.addresses if re.match(r"[a-z]+:|/|\\", address) or ".." in address] == []


def test_hypotheses_follow_the_runs_that_failed() -> None:
    text = report_html(MIXED, PLAYBOOK)
    assert text.index("<h2>Hypotheses</h2>") > text.rindex('<section class="run ')


def test_evidence_is_folded_on_the_page_and_repeats_nothing() -> None:
    (cause, *_) = DEADLOCK.findings
    assert DEADLOCK.culprit is not None
    outcome = replace(
        DEADLOCK,
        spec=replace(DEADLOCK.spec, about="train.py on 2 ranks", ranks=2, subject="train.py"),
        verdict=replace(DEADLOCK.verdict, summary=cause.claim),
        findings=(replace(cause, place=DEADLOCK.culprit.place),),
    )
    report = replace(QUIET, outcomes=(outcome,))
    page, text = report_html(report, PLAYBOOK), summary_md(report, PLAYBOOK)
    assert '<details class="part"><summary>Evidence</summary>' in page
    assert "train.py on 2 ranks" not in page + text
    assert page.lower().count(cause.claim.lower()) == text.lower().count(cause.claim.lower()) == 1
    assert "peak memory 412 MB" not in summary_md(QUIET, PLAYBOOK)  # its table has it


def test_a_long_launch_does_not_squeeze_the_picture_of_the_ranks() -> None:
    slow_start = replace(DEADLOCK, timing=replace(DEADLOCK.timing, launch_s=85.0, wall_s=100.0, teardown_s=0.0))
    drawing = lanes(slow_start)
    assert drawing is not None
    assert [(part.kind, part.percent) for part in drawing.lanes[0].stretches] == [
        ("launch", 15.0), ("moving", 55.5), ("still", 29.5),
    ]  # fmt: skip
    assert drawing.launch == "launch (85.0 s, not to scale)"


def test_every_address_in_the_page_and_its_anchors_exist() -> None:
    text = report_html(MIXED, PLAYBOOK)
    for number in re.findall(r'href="#run-([0-9]+)"', text):
        assert f'id="run-{number}"' in text


@pytest.mark.parametrize(
    "outcome", [DEADLOCK, FAILED, SKIPPED, ERRED, FLAKY_FIRST], ids=lambda outcome: outcome.spec.scenario
)
def test_the_answer_to_a_run_that_did_not_pass_comes_before_its_evidence_and_how_to_repeat_it(outcome: Outcome) -> None:
    text = summary_md(replace(MIXED, outcomes=(outcome,)), PLAYBOOK)
    assert re.findall(r"^### (.*)$", text, re.M)[:2] == ["Evidence", "Repeat it"]
    beginning = text.split("### ", 1)[0]
    assert answer.sentence(outcome.verdict.summary).split(" ")[-1] in beginning
    assert all(stack.frames[0].function in beginning for stack in outcome.stacks if stack.frames[0].function)
    assert meaning(outcome) in text
    assert outcome.repeat_command is not None
    assert outcome.repeat_command in text


def test_each_kind_of_hang_and_each_status_has_a_meaning() -> None:
    kinds = {meaning(replace(DEADLOCK, verdict=replace(DEADLOCK.verdict, kind=kind))) for kind in HangKind}
    plain = replace(PASSED.verdict, cause="exception")
    statuses = {
        meaning(replace(PASSED, verdict=replace(plain, status=status))) for status in set(Status) - {Status.HANG}
    }
    assert len(kinds | statuses) == len(HangKind) + len(Status) - 1


@pytest.mark.parametrize("quoted", [False, True])
def test_the_exception_of_the_first_rank_that_failed_is_shown_unless_the_sentence_quotes_it(quoted: bool) -> None:
    message = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:5021 | and more"
    summary = f"rank 1 raised {message}" if quoted else "rank 1 left the loop"
    outcome = replace(FAILED, raised=f"rank 1: {message}", verdict=replace(FAILED.verdict, summary=summary))
    report = replace(MIXED, outcomes=(outcome,))
    assert answer.raised(outcome) == ("" if quoted else f"rank 1: {message}")
    shown = " ".join(" ".join(answer_lines(outcome, 200)).split())
    for text in (shown, prompt_text(report), junit_xml(report)):
        assert (f"rank 1: {message}" in text) is not quoted
    assert ("**Raised:**" in summary_md(report, PLAYBOOK)) is not quoted
    assert ("Raised:" in report_html(report, PLAYBOOK)) is not quoted
    assert answer.raised(replace(outcome, raised="")) == ""
    assert answer.raised(replace(outcome, raised="rank 1: SystemExit")) == "rank 1: SystemExit"
