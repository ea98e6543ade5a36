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
from nsa_harness.render.events import Events
from nsa_harness.render.listener import Listener, notify
from nsa_harness.render.terminal.answer import answer_lines
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
    long = replace(outcome, rank_statuses=hundreds, verdict=replace(outcome.verdict, summary="why " * 400))
    for one in (outcome, long):
        whole = [*answer_lines(one, 80), *done_lines(replace(QUIET, outcomes=(one,)), PLAYBOOK, RUN_DIR, 80)]
        assert len(whole) <= 15
        verbose = list(outcome_lines(one, 80, verbose=True))
        assert verbose[-len(answer_lines(one, 80)) :] == answer_lines(one, 80)


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
    assert [line for line in lines if line.endswith("more rows: use -v")]


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
