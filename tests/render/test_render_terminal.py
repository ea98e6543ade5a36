"""The terminal, the event stream, and the rule that one of them failing costs only itself."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from render_samples import (
    DEADLOCK,
    ERRED,
    FAILED,
    FLAKY_SECOND,
    LIVELOCK,
    MACHINE,
    MIXED,
    PASSED,
    POISON,
    QUIET,
    SKIPPED,
    judged,
    poison,
)
from rich.cells import cell_len

from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.core.plan import Expect, Launcher, Limits, RunSpec, Skip
from nsa_harness.core.report import Finding, MachineFacts, Outcome, Report, Status
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.events import Events
from nsa_harness.render.listener import Listener, notify
from nsa_harness.render.terminal.answer import answer_lines, ranks_table
from nsa_harness.render.terminal.screen import (
    done_lines,
    launched_lines,
    news_line,
    outcome_line,
    outcome_lines,
    plan_lines,
)
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK

Golden = Callable[[str, str], None]
RUN_DIR = Path("reports/20261121T101500-3f2a")
SPEC = RunSpec(
    scenario="ddp_onestep",
    about="One DDP step with every trace on",
    ranks=2,
    launcher=Launcher.TORCHRUN,
    program=("nsa.train",),
    env=(),
    cwd=None,
    backend="gloo",
    device="cpu",
    subject="shape ci (4 layers, dim 128, T 256, fp32)",
    limits=Limits(deadline_s=600.0),
    expect=Expect(),
    fault=None,
    notes=("CPU form, chosen because this machine has no GPU",),
    not_covered=("nccl",),
    spec_hash="9c1e",
)
INTERRUPTED = replace(QUIET, interrupted=True, outcomes=(replace(PASSED, next_command=None),))
SKIP = Skip(scenario="ddp_nccl", about="DDP over NCCL", reason="needs 2 GPUs, this machine has none")


def rank_progress(rank: int, quiet_s: float | None = 0.4) -> RankProgress:
    return RankProgress(
        rank=rank, phase="backward", step=3, no_progress_s=quiet_s, rss_bytes=412_000_000, module="blocks.3.attn.sel"
    )


PROGRESS = Progress(elapsed_s=4.2, deadline_s=600.0, ranks=(rank_progress(0), rank_progress(1, None)))


class Screen(io.StringIO):
    """A stream with an encoding, that is a terminal or not."""

    def __init__(self, *, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty = tty
        self._encoding = encoding

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


HUNG = replace(DEADLOCK, spec=replace(DEADLOCK.spec, scenario="ddp_onestep"), dir="ddp_onestep")


def tell_a_run(listener: Listener) -> None:
    listener.on_plan(MACHINE, [SPEC, SKIP])
    listener.on_launch(SPEC)
    listener.on_phase("ddp_onestep", "launch", replace(PROGRESS, ranks=()))
    listener.on_phase("ddp_onestep", "backward", PROGRESS)
    listener.on_phase("ddp_onestep", "backward", replace(PROGRESS, elapsed_s=5.0))
    listener.on_stall("ddp_onestep", "rank 1 is quiet for 5.0 s in all_reduce #14")
    listener.on_progress_again("ddp_onestep", "rank 1 left all_reduce #14; the limit is 12.0 s")
    listener.on_interrupt(1)
    listener.on_outcome(HUNG, RUN_DIR)
    listener.on_outcome(SKIPPED, RUN_DIR)
    listener.on_done(MIXED, RUN_DIR)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screens_are_as_recorded(golden: Golden, width: int) -> None:
    screens: list[Sequence[str]] = [list(plan_lines("0.1.0", MACHINE, [SPEC, SKIP], width))]
    screens += [list(launched_lines(SPEC, width)), list(news_line("ddp_onestep", "backward", PROGRESS, width))]
    for outcome in (PASSED, DEADLOCK, LIVELOCK, FAILED, SKIPPED, ERRED, FLAKY_SECOND):
        screens += [list(outcome_lines(outcome, width))]
    screens += [list(outcome_lines(DEADLOCK, width, verbose=True))]
    screens += [list(outcome_line(outcome, width)) for outcome in MIXED.outcomes]
    screens += [list(done_lines(report, PLAYBOOK, RUN_DIR, width)) for report in (MIXED, QUIET, INTERRUPTED)]
    golden(f"screens.{width}.txt", "".join("\n".join(lines) + "\n" + "." * width + "\n" for lines in screens))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("outcome", [*MIXED.outcomes, poison(DEADLOCK)], ids=lambda outcome: outcome.dir)
def test_a_line_is_wider_than_the_screen_only_to_keep_a_command_or_a_path_whole(width: int, outcome: object) -> None:
    assert isinstance(outcome, type(PASSED))
    whole = {path for finding in outcome.findings for path in finding.proof} | {outcome.repeat_command}
    whole |= {f"nsa-harness explain {outcome.verdict.cause}"}
    lines = [line for line in outcome_lines(outcome, width) if cell_len(line) > width]
    kept = [line for line in lines if outcome.dir != "hostile" and line.strip() not in whole]
    assert kept == []
    assert not [line for line in lines if "\x1b" in line or "\n" in line]


@pytest.mark.parametrize("outcome", MIXED.outcomes, ids=lambda outcome: outcome.dir)
def test_the_answer_ends_the_screen_of_a_small_terminal(outcome: Outcome) -> None:
    if outcome.verdict.status is Status.PASS:
        return
    hundreds = tuple(replace(DEADLOCK.rank_statuses[0], rank=rank, waits_for=f"rank {rank + 1}") for rank in range(300))
    long = replace(outcome, rank_statuses=hundreds, verdict=replace(outcome.verdict, summary="why " * 110))
    for one in (outcome, long):
        whole = [*answer_lines(one, 80), *done_lines(replace(QUIET, outcomes=(one,)), PLAYBOOK, RUN_DIR, 80)]
        assert len(whole) <= (19 if one is outcome else 22)  # of 24 rows
        verbose = list(outcome_lines(one, 80, verbose=True))
        assert verbose[-len(answer_lines(one, 80)) :] == answer_lines(one, 80)


LONG_ADVICE = " ".join(f"step {number} of what to do" for number in range(30))
LONG_LINE = f"total = {' + '.join(f'compute_part_{number}(batch)' for number in range(12))}"


def long_winded() -> Outcome:
    """A failure whose advice, source lines and function names are longer than a line of any terminal."""
    (finding, *more), (first, *others) = DEADLOCK.findings, DEADLOCK.stacks
    frame = replace(first.frames[0], function="validate_the_configuration_of_the_whole_run", text=LONG_LINE)
    assert DEADLOCK.culprit is not None
    return replace(
        DEADLOCK,
        findings=(replace(finding, advice=LONG_ADVICE, left_open=()), *more),
        stacks=(replace(first, frames=(frame, *first.frames[1:])), *others),
        culprit=replace(DEADLOCK.culprit, place=replace(frame, file="/home/ada/other.py", line=3)),
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_what_the_reader_needs_next_is_wrapped_and_never_cut(width: int) -> None:
    lines = answer_lines(long_winded(), width)
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    assert LONG_ADVICE in text
    assert text.count(LONG_LINE) == 2  # the line to look at, and the first stack
    assert "validate_the_configuration_of_the_whole_run" in text
    assert "rank_conditional_collective" in [line.split()[-1] for line in lines]


def test_a_long_cell_of_the_ranks_is_wrapped_and_not_cut() -> None:
    ending = "was terminated by SIGTERM · last line: step 12 of 400, loss 3.2, 4.1 s per step, lr 0.0003"
    rows = tuple(replace(row, blocked_in=ending, waits_for="", no_progress_s=None) for row in DEADLOCK.rank_statuses)
    lines = list(ranks_table(replace(DEADLOCK, rank_statuses=rows), 4, 80, wrap=True))
    assert " ".join(" ".join(lines).replace("◀ culprit", "").split()).count(ending) == 2
    assert all(cell_len(line) <= 80 for line in lines)


def test_a_pipe_has_no_width() -> None:
    pipe = Screen(tty=False)
    terminal = Terminal(pipe, version="0.1.0", playbook=PLAYBOOK, environ={})
    terminal.on_outcome(long_winded(), RUN_DIR)
    terminal.close()
    lines = pipe.getvalue().splitlines()
    assert f"  do        {LONG_ADVICE}" in lines
    assert [line for line in lines if line.startswith("    look at other.py:3") and line.endswith(f"▸ {LONG_LINE}")]
    assert "…" not in pipe.getvalue()
    assert [line for line in lines if line.startswith("  also      memory_growth")]


def test_an_arrow_that_would_point_at_every_rank_is_left_out() -> None:
    both = tuple(replace(row, is_culprit=True) for row in DEADLOCK.rank_statuses)
    assert DEADLOCK.culprit is not None
    either = replace(DEADLOCK, rank_statuses=both, culprit=replace(DEADLOCK.culprit, ranks=(0, 1)))
    for text in ("\n".join(answer_lines(either, 80)), summary_md(replace(QUIET, outcomes=(either,)), PLAYBOOK)):
        assert "culprit" not in text
    page = report_html(replace(QUIET, outcomes=(either,)), PLAYBOOK)
    assert "culprit" not in page.partition("<main")[2]
    assert "◀ culprit" in "\n".join(answer_lines(DEADLOCK, 80))


@pytest.mark.parametrize("outcome", MIXED.outcomes, ids=lambda outcome: outcome.dir)
def test_every_failing_answer_says_what_to_do(outcome: Outcome) -> None:
    unexplained = replace(outcome, findings=tuple(replace(finding, advice="") for finding in outcome.findings))
    for one in (outcome, unexplained):
        says_it = any(line.split()[:1] == ["do"] for line in answer_lines(one, 80))
        assert says_it is (outcome.verdict.status in (Status.HANG, Status.FAIL, Status.ERROR))


def test_of_a_few_failures_each_says_what_to_do() -> None:
    few = replace(MIXED, outcomes=tuple(replace(one, expected=False) for one in (DEADLOCK, FAILED, PASSED)))
    lines = list(done_lines(few, PLAYBOOK, RUN_DIR, 80))
    assert sum(line.startswith("      do  ") for line in lines) == 2


def commands_after(outcome: Outcome) -> list[list[str]]:
    lines = done_lines(replace(QUIET, outcomes=(outcome,)), PLAYBOOK, RUN_DIR, 80)
    return [line.split(maxsplit=1) for line in lines if line.split()[0] in ("next", "fixed?")]


def test_the_next_command_after_a_failure_explains_it_and_never_repeats_it() -> None:
    hung = replace(DEADLOCK, next_command=None)
    fixed = ["fixed?", f"nsa-harness run --verify {RUN_DIR}"]
    assert commands_after(hung) == [["next", f"nsa-harness why {RUN_DIR}"], fixed]
    waits = replace(hung, verdict=replace(hung.verdict, cause="lock_cycle"))
    waits = replace(waits, findings=(replace(hung.findings[0], code="lock_cycle"),))
    assert commands_after(waits) == [["next", "nsa-harness explain lock_cycle"], fixed]
    unknown = replace(hung, verdict=replace(hung.verdict, cause="unknown"))
    unknown = replace(unknown, findings=(replace(hung.findings[0], code="unknown"),))
    assert commands_after(replace(unknown, culprit=None, spec=replace(unknown.spec, ranks=1))) == [
        ["next", f"nsa-harness report -v {RUN_DIR}"], fixed,
    ]  # fmt: skip


def test_a_run_that_was_not_judged_is_not_proposed_again_and_an_unforeseen_pass_is_repeated() -> None:
    assert commands_after(ERRED) == [["next", f"nsa-harness report -v {RUN_DIR}"]]
    passed = replace(PASSED, expected=False, next_command=None, repeat_command="nsa-harness run spec.json")
    assert commands_after(passed) == [["next", "nsa-harness run --repeat=5 spec.json"]]


def test_a_row_of_a_plan_shows_steps_loss_and_memory_only() -> None:
    metrics = {**PASSED.metrics, "fetch_s": 0.001, "forward_s": 0.24, "grad_norm": 0.79432}
    timed = replace(PASSED, metrics=metrics)
    (line,) = outcome_line(timed, 100)
    assert line == "PASS  ddp_onestep   4.6 s · 1 step · loss 5.5512 → 5.5479 · peak memory 412 MB"
    whole = " ".join(outcome_lines(timed, 1000))
    assert "grad_norm 0.79432" in whole
    assert "fetch" not in whole


def test_after_a_skip_nothing_is_proposed() -> None:
    assert commands_after(replace(SKIPPED, next_command=None)) == []


def test_a_plan_ends_with_its_failures_the_worst_first() -> None:
    order = [FAILED, DEADLOCK, PASSED, ERRED]
    unforeseen = tuple(replace(one, expected=one is PASSED) for one in order)
    lines = list(done_lines(replace(MIXED, outcomes=unforeseen), PLAYBOOK, RUN_DIR, 80))
    heads = [line.split("   ")[0] for line in lines if line[:1].isupper()]
    assert heads == ["HANG  branch_sel_only", "FAIL  gc_baseline_full", "ERROR  fsdp"]
    assert [line for line in lines if line.startswith("4 runs: 1 HANG")]


def test_the_command_after_a_plan_verifies_a_fix_of_the_worst_failure() -> None:
    theirs = replace(FAILED.spec, device="any", backend="any", settings=(("run.program", "train.py"),))
    raised = replace(FAILED.verdict, cause="exception", summary="rank 0 raised ValueError: boom")
    failed = replace(FAILED, verdict=raised, findings=(), spec=theirs, next_command=None)
    foreign = replace(theirs, scenario=ERRED.spec.scenario)
    bad = (replace(ERRED, spec=foreign, next_command=None), replace(failed, expected=False))
    lines = list(done_lines(judged(replace(MIXED, outcomes=bad)), PLAYBOOK, RUN_DIR, 100))
    assert lines[-2] == f"  fixed?    nsa-harness run --verify {RUN_DIR}/gc_baseline_full"


def test_ranks_that_stand_alike_share_a_row_and_what_is_left_out_is_said() -> None:
    alike = tuple(replace(DEADLOCK.rank_statuses[0], rank=rank, is_culprit=rank == 700) for rank in range(1000))
    lines = list(outcome_lines(replace(DEADLOCK, rank_statuses=alike), 80))
    assert [line for line in lines if line.split()[:1] == ["700"] and line.endswith("◀ culprit")]
    assert [line for line in lines if line.startswith("  0-699, 701-999   all_reduce #14")]
    apart = tuple(replace(row, waits_for=f"rank {row.rank + 1}") for row in alike)
    lines = list(outcome_lines(replace(DEADLOCK, rank_statuses=apart), 80))
    assert [line for line in lines if line.split()[:1] == ["700"] and line.endswith("◀ culprit")]
    assert [line for line in lines if line == "  and 998 more rows, all with -v"]


def test_what_is_wrong_in_a_run_that_passed_stands_below_it_and_what_only_informs_does_not() -> None:
    noted = [
        Finding(code=code, claim=f"seen in {code}", ranks=(1,), place=None, confidence=0.85, proof=(), advice="do")
        for code in ("replica_divergence", "find_unused_needless")
    ]
    silent = replace(PASSED, findings=tuple(noted))
    told = "      but replica_divergence (likely): seen in replica_divergence"
    assert [*outcome_lines(silent, 80)] == [*outcome_lines(PASSED, 80), told]
    assert [*outcome_line(silent, 80)] == [*outcome_line(PASSED, 80), told]


def test_after_one_run_that_passed_the_plan_is_proposed_for_our_own_program_alone() -> None:
    ours = replace(PASSED, next_command=None)
    foreign = replace(
        ours,
        spec=replace(ours.spec, device="any", settings=(("run.program", "train.py"),)),
    )
    proposed = [
        [line for line in done_lines(replace(QUIET, outcomes=(one,)), PLAYBOOK, RUN_DIR, 80) if "next" in line]
        for one in (ours, foreign, replace(foreign, next_command="nsa-harness run train.py"))
    ]
    assert proposed == [["  next      nsa-harness run -t plan"], [], ["  next      nsa-harness run train.py"]]


def test_without_a_terminal_a_run_is_plain_lines(golden: Golden) -> None:
    stream = Screen(tty=False)
    tell_a_run(Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100"}))
    golden("plain.txt", stream.getvalue())


def test_a_note_that_several_runs_have_is_shown_once() -> None:
    stream = Screen(tty=False)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={})
    others = [replace(SPEC, scenario=name, notes=(*SPEC.notes, f"only {name}")) for name in ("one", "two")]
    terminal.on_plan(MACHINE, [SPEC, *others])
    for spec in (SPEC, *others, others[-1]):
        terminal.on_launch(spec)
    terminal.close()
    text = stream.getvalue()
    assert text.count(SPEC.notes[0]) == text.count("only one") == text.count("only two") == 1
    assert f"every run: {SPEC.notes[0]}" in text


def test_a_stream_that_is_not_utf_8_gets_ascii(golden: Golden) -> None:
    stream = Screen(tty=False, encoding="ascii")
    tell_a_run(Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100"}))
    assert stream.getvalue().isascii()
    golden("plain.ascii.txt", stream.getvalue())


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_means_plain_lines_on_a_terminal_too(environ: dict[str, str]) -> None:
    plain, asked = Screen(tty=False), Screen(tty=True)
    tell_a_run(Terminal(plain, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100"}))
    tell_a_run(Terminal(asked, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100", **environ}))
    assert asked.getvalue() == plain.getvalue()


def test_hostile_text_cannot_steer_the_terminal() -> None:
    stream = Screen(tty=False)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "80"})
    terminal.on_plan(MachineFacts(host=POISON, cpus=1, gpus=(POISON,), torch=POISON), [replace(SPEC, subject=POISON)])
    terminal.on_launch(replace(SPEC, scenario=POISON, notes=(POISON,)))
    terminal.on_phase(POISON, POISON, PROGRESS)
    terminal.on_stall(POISON, POISON)
    terminal.on_outcome(poison(DEADLOCK), Path(POISON.replace("\x00", "")))
    terminal.settle()
    assert stream.getvalue().count("red") > 10
    assert set("\x1b\x9b\x07\x00\r\u202e").isdisjoint(stream.getvalue())


def test_the_event_stream_is_as_recorded(golden: Golden) -> None:
    stream = io.StringIO()
    times = iter(range(100))
    events = Events(stream, MIXED.run_id, lambda: float(next(times)))
    tell_a_run(events)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == (
        ["plan", "launch", "phase", "phase", "suspect", "released", "outcome", "outcome", "done"]
    )
    assert all(list(line)[:5] == ["schema", "event", "t_s", "run_id", "scenario"] for line in lines)
    golden("events.jsonl", stream.getvalue())


def test_an_outcome_event_holds_what_report_json_holds() -> None:
    from nsa_harness.render.documents.report_json import to_json

    stream = io.StringIO()
    Events(stream, "r", lambda: 0.0).on_outcome(DEADLOCK, RUN_DIR)
    stored = json.loads(to_json(replace(MIXED, outcomes=(DEADLOCK,))))
    assert json.loads(stream.getvalue())["outcome"] == stored["outcomes"][0]


def test_a_listener_that_fails_costs_only_itself() -> None:
    closed, first, last = io.StringIO(), io.StringIO(), io.StringIO()
    closed.close()
    listeners = [Events(stream, "r", lambda: 0.0) for stream in (first, closed, last)]
    trouble = notify(listeners, lambda listener: listener.on_stall("a", "quiet"))
    assert first.getvalue() == last.getvalue() != ""
    assert [(item.what, item.why) for item in trouble] == [
        ("output through Events", "ValueError: I/O operation on closed file")
    ]


def test_an_interrupt_passes_through_the_listeners() -> None:
    def interrupted(_: Listener) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        notify([Events(io.StringIO(), "r", lambda: 0.0)], interrupted)


def annotated(report: Report, environ: dict[str, str]) -> list[str]:
    screen = Screen(tty=False)
    terminal = Terminal(screen, version="0.1.0", playbook=PLAYBOOK, environ=environ)
    terminal.on_done(report, RUN_DIR)
    terminal.close()
    return [line for line in screen.getvalue().splitlines() if line.startswith("::")]


def test_a_step_of_github_gets_annotations_the_worst_first_and_nobody_else() -> None:
    place = replace(DEADLOCK.culprit.place, file="/home/ci/repo/nsa/a,b.py")  # type: ignore[union-attr]
    hung = replace(DEADLOCK, culprit=replace(DEADLOCK.culprit, place=place))
    hung = replace(hung, verdict=replace(hung.verdict, summary="100% of\nthe ranks wait"))
    report = replace(MIXED, outcomes=(FAILED, PASSED, *[hung] * 12))
    on_github = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/home/ci/repo"}
    lines = annotated(report, on_github)
    assert lines == ["::error file=nsa/a%2Cb.py,line=212,title=HANG branch_sel_only::100%25 of / the ranks wait."] * 10
    first = annotated(replace(MIXED, outcomes=(FAILED, PASSED)), on_github)
    assert first[0].startswith("::error file=nsa/model.py,line=212,title=FAIL gc_baseline_full::Rank 0 raised")
    assert annotated(report, {}) == []
