"""Every renderer shows the sentence, cause code, command, remedy and line in full, at any width and in a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from bisect_samples import KEYS, ONE_KEY, SAMPLES, SINGLE
from conftest import GOLDEN
from render_samples import DEADLOCK, FAILED, LIVELOCK, MIXED, judged

from nsa_harness.core.experiment.claim import ClaimReport, ClaimTerms, VerificationResult, VerifyReport
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.report import Outcome
from nsa_harness.core.search.question import ProbeResult
from nsa_harness.render.documents.case_reports import junit_xml
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.plain_text import prompt_text
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.experiments.bisect_md import bisect_md
from nsa_harness.render.experiments.claim import header_lines, trial_lines, verify_answer, verify_lines
from nsa_harness.render.experiments.screen import stored_lines
from nsa_harness.render.terminal.answer import answer_lines
from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.render.terminal.screen import done_lines, outcome_line, outcome_lines
from nsa_harness.subject.playbook import PLAYBOOK

WIDTHS = (40, 60, 80, 200, NO_WIDTH)
RUN_DIR = Path("reports/20261121T101500-3f2a")
FILE = "/home/user/projects/a_directory_with_a_long_name/training_program.py"
LONG = " ".join(f"word{number}" for number in range(60))
CODE = "a_cause_code_that_has_more_characters_than_a_narrow_screen"
END = f"HANG · {CODE} · {FILE.rpartition('/')[2]}:4711"


def long(outcome: Outcome) -> Outcome:
    """Return the outcome with a long text in each part that the reader needs."""
    assert outcome.culprit is not None
    assert outcome.culprit.place is not None
    place = replace(outcome.culprit.place, file=FILE, line=4711, text=f"if step == 50 and {LONG}:")
    finding = replace((*outcome.findings, *DEADLOCK.findings)[0], code=CODE, claim=f"claim {LONG} at train.py:77")
    finding = replace(finding, advice=f"advice {LONG} (data.py:99)", left_open=(f"open {LONG} b.py:1",))
    other = replace(finding, code=f"other_{CODE}", claim=f"also {LONG} at loader.py:13", left_open=())
    return replace(
        outcome,
        verdict=replace(outcome.verdict, cause=CODE, summary=f"rank 1 {LONG} waits in all_reduce (train.py:41)"),
        culprit=replace(outcome.culprit, place=place),
        findings=(finding, other),
        repeat_command=f"nsa-harness run reports/latest/{CODE}/spec.json -- {LONG.replace(' ', ' --')}",
    )


OUTCOMES = [
    *map(long, (DEADLOCK, LIVELOCK, FAILED)),
    *(one for one in MIXED.outcomes if one.final and not one.expected),
]
SEVERAL = judged(replace(MIXED, outcomes=tuple(OUTCOMES)))
NAMES = [outcome.dir for outcome in OUTCOMES]


def words(text: str | Iterable[str]) -> str:
    return " ".join((text if isinstance(text, str) else "\n".join(text)).split())


def needed(outcome: Outcome) -> Iterator[str]:
    """Yield what the reader needs next: the sentence, the cause code, the remedy and the line."""
    yield outcome.verdict.summary[1:]
    if cause := next((one for one in outcome.findings if one.code == outcome.verdict.cause), None):
        yield from (cause.code, cause.advice)
    if outcome.culprit and (place := outcome.culprit.place) and place.file and place.text:
        yield from (f"{place.file.rpartition('/')[2]}:{place.line}", place.text.rpartition("\n")[2].strip())


def assert_shown(texts: Iterable[str], shown: str | Iterable[str]) -> None:
    all_shown = words(shown)
    missing = [text for text in texts if words(text) not in all_shown]
    assert not missing, all_shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("outcome", OUTCOMES, ids=NAMES)
def test_the_terminal_shows_all_that_the_reader_needs(outcome: Outcome, width: int) -> None:
    for shown in (answer_lines(outcome, width), outcome_lines(outcome, width, verbose=True)):
        assert_shown(needed(outcome), shown)
    assert_shown([outcome.verdict.summary[1:]], outcome_line(outcome, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_end_of_several_runs_cuts_no_sentence_and_no_remedy(width: int) -> None:
    shown = list(done_lines(SEVERAL, PLAYBOOK, RUN_DIR, width))
    assert_shown([one.verdict.summary[1:] for one in OUTCOMES], shown)
    one = list(done_lines(judged(replace(MIXED, outcomes=(OUTCOMES[0],))), PLAYBOOK, RUN_DIR, width))
    assert_shown([f"nsa-harness run --verify {RUN_DIR}", f"{RUN_DIR}/report.html"], one)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=NAMES)
def test_a_document_cuts_nothing_that_the_reader_needs(outcome: Outcome) -> None:
    report = judged(replace(MIXED, outcomes=(outcome,)))
    commands = [outcome.repeat_command or ""]
    page = re.sub(r"<(style|script)>.*?</\1>|<[^>]+>", "", report_html(report, PLAYBOOK), flags=re.DOTALL)
    assert_shown([*needed(outcome), *commands], unescape(page))
    markdown = re.sub(r"\\(?=[!-/:-@\[-`{-~])", "", summary_md(report, PLAYBOOK))
    assert_shown([*needed(outcome), *commands], markdown)
    assert_shown([*needed(outcome), *commands], unescape(junit_xml(report)))
    assert_shown(needed(outcome), prompt_text(report))


TRIALS = (
    Trial(config=0, counts_as=ProbeResult.BAD, end=END, dir="a", wall_s=71.3),
    Trial(config=1, counts_as=ProbeResult.BAD, end=END, dir="b", wall_s=71.3),
)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_row_of_a_trial_shows_how_it_ended(width: int) -> None:
    labels = (f"--without {LONG}", f"--with {LONG}")
    terms = ClaimTerms(confidence=0.95)
    claim = ClaimReport(text=f"{LONG} helps", scenario="train", key="", labels=labels, terms=terms)
    assert_shown(labels, header_lines(claim, width))
    for count in (1, 2):
        lines = list(trial_lines(replace(claim, trials=TRIALS[:count]), width))
        assert_shown([f"{CODE} · {FILE.rpartition('/')[2]}:4711"], lines)
        assert width < 80 or all(len(line) <= width for line in lines)
    assert_shown(["at most 99 more pairs"], trial_lines(replace(claim, trials=TRIALS), width))
    verify = VerifyReport(
        scenario="train",
        run_id="r",
        end=END,
        count_in_run=(1, 1),
        count_in_all_runs=(1, 1),
        lowest_count=(1, 1),
        passes_needed=3,
        confidence=0.95,
        trials=TRIALS[:1],
        result=VerificationResult.NOT_FIXED,
    )
    for shown in (verify_lines(verify, width), verify_answer(verify, RUN_DIR, None, width)):
        assert_shown([f"{CODE} · {FILE.rpartition('/')[2]}:4711"], shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_bisection_cuts_no_cause_and_no_command(width: int) -> None:
    text = f"{LONG} at train.py:41"
    probes = tuple(replace(probe, cause=CODE, summary=text) for probe in SINGLE.probes)
    search = replace(SINGLE, probes=probes, notes=(f"{LONG} is noted",))
    commands = [command for command in vars(search.commands).values() if command]
    assert_shown([*commands, *search.notes], stored_lines(search, RUN_DIR, width))
    assert_shown([*commands, *search.notes, text], bisect_md(search))


def test_a_bisection_over_settings_with_long_values_shows_them_in_full() -> None:
    subject = replace(KEYS, bad_values=("fsdp", True, LONG, "1", "cmp+sel"))
    text = bisect_md(replace(ONE_KEY, subject=subject))
    assert "…" not in text
    assert text.count(LONG) >= len(ONE_KEY.probes) // 2


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "hostile"])
def test_no_cell_of_a_bisection_is_cut(name: str) -> None:
    search = SAMPLES[name]
    assert "…" not in bisect_md(search)
    for width in WIDTHS:
        assert "…" not in "\n".join(stored_lines(search, RUN_DIR, width))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.*")), ids=lambda path: path.name)
def test_a_golden_file_is_cut_only_where_a_hostile_text_is_or_a_module_runs(path: Path) -> None:
    cut = [line for line in path.read_text(errors="replace").split("\n") if "…" in line]
    cut = [line for line in cut if not re.search(r"^ +rank \d+ +backward .*MB   [\w.]+…$", line)]
    assert "hostile" in path.name or not cut
