"""The live view: what stands on the screen while attempts run, on real terminals and on one of glass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from glass import Glass
from render_samples import DEADLOCK, MACHINE, MIXED, PASSED, POISON, SKIPPED
from rich.cells import cell_len
from test_render_terminal import PROGRESS, RUN_DIR, SKIP, SPEC, Screen, rank_progress

from nsa_harness.core.evidence.live import Progress, milestone, next_news, time_left_s
from nsa_harness.core.report import Status
from nsa_harness.render.terminal.live_view import MAX_RANKS, EndedAttempt, RunningAttempt, View, view_lines
from nsa_harness.render.terminal.screen import news_line
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK

Golden = Callable[[str, str], None]
COLOUR = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
ONE = RunningAttempt(name="ddp_onestep", phase="step 3", progress=PROGRESS)
STALLED = replace(
    ONE, name="branch_sel_only~2", stall="no rank has made progress for 5.0 s (limit 4.0 s); taking stacks"
)
MANY = replace(PROGRESS, deadline_s=None, ranks=tuple(rank_progress(rank, float(rank % 50)) for rank in range(100)))
ENDED = EndedAttempt(status=Status.PASS, expected=True, counts=True, took_s=4.0)
HALFWAY = View(
    running=(ONE, STALLED),
    ended=(
        ENDED,
        replace(ENDED, status=Status.HANG),
        replace(ENDED, status=Status.FAIL, expected=False),
        replace(ENDED, status=Status.HANG, counts=False),
        replace(ENDED, status=Status.SKIP, took_s=0.0),
    ),
    run_count=12,
    left_s=134.2,
    interrupts=0,
)


def lively(columns: int = 80, rows: int = 24) -> tuple[Screen, Terminal]:
    stream = Screen(tty=True)
    size = {"COLUMNS": str(columns), "LINES": str(rows)}
    return stream, Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={**COLOUR, **size}, clock_s=lambda: 0.0)


def seen(stream: Screen, columns: int = 80) -> Glass:
    glass = Glass(columns)
    glass.write(stream.getvalue())
    return glass


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_view_is_as_recorded(golden: Golden, width: int) -> None:
    crowd = replace(HALFWAY, running=(replace(ONE, progress=MANY),), ended=(), interrupts=1)
    screens = [
        view_lines(replace(HALFWAY, running=(ONE,), ended=(), run_count=1, left_s=None), width, 24),
        view_lines(HALFWAY, width, 24),
        view_lines(HALFWAY, width, 8),
        view_lines(crowd, width, 24),
        view_lines(replace(HALFWAY, interrupts=2), width, 24),
    ]
    golden(f"live.{width}.txt", "".join("\n".join(lines) + "\n" + "." * width + "\n" for lines in screens))


@pytest.mark.parametrize("width", [1, 2, 20, 39, 40, 41, 59, 60, 80, 200])
@pytest.mark.parametrize("height", [0, 1, 2, 5, 24])
def test_the_view_never_leaves_the_screen(width: int, height: int) -> None:
    strange = RunningAttempt(name="名" * 50, phase="回" * 40, progress=MANY, stall="待" * 400)
    view = replace(HALFWAY, running=(strange, *HALFWAY.running, *(ONE,) * 9), interrupts=1)
    lines = view_lines(view, width, height)
    assert len(lines) <= height
    assert [line for line in lines if cell_len(line) > width] == []


def test_what_is_quiet_for_longest_stays_on_the_screen() -> None:
    lines = view_lines(replace(HALFWAY, running=(replace(ONE, progress=MANY),), run_count=1, ended=()), 80, 24)
    assert lines[0] == "  ddp_onestep   step 3 · 4.2 s"
    assert [line.split()[1] for line in lines[1:-1]] == ["46", "47", "48", "49", "96", "97", "98", "99"]
    assert lines[-1] == f"    {100 - MAX_RANKS} more ranks, with later progress"


def test_what_says_least_goes_first_where_the_screen_is_narrow() -> None:
    rows = {width: view_lines(replace(HALFWAY, running=(ONE,)), width, 24)[1] for width in (80, 66, 60, 45, 40)}
    assert [width for width, row in rows.items() if "blocks.3" in row] == [80]
    assert [width for width, row in rows.items() if "412 MB" in row] == [80, 66, 60]
    assert [width for width, row in rows.items() if "step 3" in row] == [80, 66, 60]
    assert all("rank 0" in row and "backward" in row and "no progress 0.40 s" in row for row in rows.values())


def test_a_plan_shows_what_is_done_and_a_single_run_does_not() -> None:
    several = "\n".join(view_lines(HALFWAY, 120, 24))
    assert "3 of 12 done · about 2 min 14 s left · 1 HANG · 1 FAIL · 1 SKIP · 1 PASS · 1 not as expected" in several
    alone = "\n".join(view_lines(replace(HALFWAY, running=(ONE,), ended=(), run_count=1), 120, 24))
    assert "done" not in alone


def test_the_time_left_is_that_of_what_ended_shared_by_what_runs_at_once() -> None:
    assert time_left_s([], [1.0], 5) is None
    assert time_left_s([4.0], [], 0) is None
    assert time_left_s([4.0, 6.0], [1.0], 2) == 14.0
    assert time_left_s([4.0, 6.0], [1.0, 3.0], 2) == 8.0
    assert time_left_s([4.0], [], 2) == 8.0
    assert time_left_s([4.0], [100.0], 0) is None
    assert time_left_s([100.0], [99.0, 1.0], 0) == 99.0


def test_steps_are_told_at_1_2_5_10_20_and_so_on() -> None:
    assert sorted({milestone(step) for step in range(1001)}) == [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert [milestone(step) for step in (4, 9, 19, 999)] == [2, 5, 10, 500]


def test_ten_thousand_steps_are_a_dozen_lines_and_silence_is_broken_by_a_sign_of_life() -> None:
    stream = Screen(tty=False)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100"})
    for step in range(1, 10_001):
        ranks = (replace(rank_progress(0), step=step),)
        terminal.on_phase("long", f"step {step}", Progress(elapsed_s=step / 50, deadline_s=None, ranks=ranks))
    terminal.settle()
    assert len(stream.getvalue().splitlines()) == 13
    launching = next_news(None, "launch", replace(PROGRESS, ranks=()))
    assert next_news(launching, "launch", PROGRESS) is None
    told = next_news(launching, "step 3", PROGRESS)
    assert told is not None
    assert next_news(told, "step 3", replace(PROGRESS, elapsed_s=told.at_s + 299.0)) is None
    assert next_news(told, "step 3", replace(PROGRESS, elapsed_s=told.at_s + 300.0)) is not None


def test_progress_never_goes_backwards() -> None:
    stream = Screen(tty=False)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "100"})
    for second, (phase, step) in enumerate(
        [("launch", 0), ("step 5", 5), ("launch", 0), ("step 2", 2), ("step 10", 10), ("finish", 10), ("step 10", 10)]
    ):
        ranks = (replace(rank_progress(0), step=step),)
        terminal.on_phase("one", phase, Progress(elapsed_s=400.0 * second, deadline_s=None, ranks=ranks))
    terminal.settle()
    shown = [line.split(" · ")[1] for line in stream.getvalue().splitlines()]
    assert shown == ["launch", "step 5", "step 5", "step 5", "step 10", "finish", "finish"]


def test_two_attempts_share_the_screen_until_the_last_one_ends() -> None:
    stream, terminal = lively()
    terminal.on_phase("one", "step 1", PROGRESS)
    terminal.on_phase("two~2", "launch", replace(PROGRESS, ranks=()))
    terminal.settle()
    both = seen(stream)
    assert [line for line in both.shown() if "4.2 s" in line] == [
        "  one   step 1 · 4.2 s · at most 9 min 56 s left",
        "  two~2   launch · 4.2 s · at most 9 min 56 s left",
    ]
    assert not both.cursor_is_visible
    terminal.on_outcome(replace(PASSED, spec=replace(PASSED.spec, scenario="one"), dir="one"), RUN_DIR)
    terminal.settle()
    assert "  two~2   launch" in seen(stream).shown()[-2]
    terminal.on_outcome(replace(PASSED, spec=replace(PASSED.spec, scenario="two"), attempt=2, dir="two~2"), RUN_DIR)
    terminal.settle()
    assert seen(stream).cursor_is_visible
    assert "at most" not in "\n".join(seen(stream).shown())


def test_the_screen_ends_as_a_plain_one_does_with_the_cursor_back() -> None:
    stream, terminal = lively()
    plain = Screen(tty=False)
    for one in (terminal, Terminal(plain, version="0.1.0", playbook=PLAYBOOK, environ={"COLUMNS": "80"})):
        one.on_plan(MACHINE, [SPEC, SKIP])
        one.on_launch(SPEC)
        if one is terminal:
            one.on_phase("ddp_onestep", "step 1", PROGRESS)
            one.settle()
            one.on_stall("ddp_onestep", "quiet for 5.0 s")
            one.settle()
            assert "    stall   quiet for 5.0 s" in seen(stream).shown()
        one.on_outcome(replace(DEADLOCK, dir="ddp_onestep"), RUN_DIR)
        one.on_outcome(SKIPPED, RUN_DIR)
        one.on_done(MIXED, RUN_DIR)
        one.close()
    assert seen(stream).shown() == plain.getvalue().split("\n")
    assert seen(stream).cursor_is_visible
    assert "\x1b[1;37;41mHANG\x1b[0m" in stream.getvalue()


def test_a_suspect_that_moves_again_leaves_one_line() -> None:
    stream, terminal = lively()
    terminal.on_phase("one", "step 1", PROGRESS)
    terminal.on_stall("one", "no rank has moved")
    terminal.settle()
    assert "    stall   no rank has moved" in seen(stream).shown()
    terminal.on_progress_again("one", "progress again after 5.0 s")
    terminal.settle()
    assert seen(stream).shown()[0] == "moving one   progress again after 5.0 s"
    assert "stall" not in "\n".join(seen(stream).shown())


def test_an_interrupt_is_answered_in_the_view_and_a_second_one_stays_on_the_screen() -> None:
    stream, terminal = lively()
    terminal.on_phase("one", "step 1", PROGRESS)
    terminal.on_interrupt(1)
    terminal.settle()
    assert "  interrupted: reading stacks, ending the processes, writing the report; Ctrl-C" in seen(stream).shown()
    terminal.on_interrupt(2)
    terminal.close()
    assert "interrupted twice: killing the processes now" in " ".join(seen(stream).shown())
    assert seen(stream).cursor_is_visible


def test_an_interrupt_without_a_view_is_a_line() -> None:
    stream = Screen(tty=False)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={})
    terminal.on_interrupt(1)
    terminal.on_interrupt(2)
    terminal.close()
    assert stream.getvalue().splitlines() == [
        "  interrupted: reading stacks, ending the processes, writing the report; Ctrl-C",
        "  again kills at once",
        "  interrupted twice: killing the processes now; the report is still written",
    ]


def test_closing_twice_leaves_the_cursor_visible() -> None:
    stream, terminal = lively()
    terminal.on_phase("one", "forward", PROGRESS)
    terminal.settle()
    terminal.close()
    terminal.close()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_hostile_text_cannot_steer_the_live_view() -> None:
    stream, terminal = lively()
    ranks = (replace(rank_progress(0), phase=POISON, module=POISON),)
    terminal.on_phase(POISON, POISON, replace(PROGRESS, ranks=ranks))
    terminal.on_stall(POISON, POISON)
    terminal.settle()
    assert "red" in "\n".join(seen(stream).shown())
    assert "\x9b" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


@pytest.mark.parametrize("environ", [{"CI": "true"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_where_nobody_watches_or_nothing_can_move_lines_are_plain(environ: dict[str, str]) -> None:
    stream = Screen(tty=True)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={**COLOUR, **environ})
    terminal.on_phase("one", "step 1", PROGRESS)
    terminal.close()
    assert stream.getvalue() == "  one · step 1 · 4.2 s of at most 10 min\n"


def test_a_rank_without_progress_is_told_once_it_says_something() -> None:
    def told(quiet_s: float) -> str:
        (line,) = news_line("one", "step 1", replace(PROGRESS, ranks=(rank_progress(0, quiet_s=quiet_s),)), 80)
        return line

    assert told(1.9).endswith("of at most 10 min")
    assert told(2.0).endswith(" · rank 0: no progress for 2.0 s")
