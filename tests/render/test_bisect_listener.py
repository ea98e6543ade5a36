"""What people see while a bisection runs: on a terminal, in a log, and when the stream breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bisect_samples import SINGLE, BisectReport, ProbeReport, hostile
from glass import Glass
from render_samples import POISON
from test_live_view import COLOUR
from test_render_terminal import Screen

from nsa_harness.core.search.question import AnswerKind, Round, SearchAnswer
from nsa_harness.core.search.waits import Waiting
from nsa_harness.render.experiments.picture import rows
from nsa_harness.render.experiments.screen import BisectScreen, stored_lines

Golden = Callable[[str, str], None]
RUN_DIR = Path("reports/20261121T101500-3f2a")
UNKNOWN = SearchAnswer(kind=AnswerKind.UNDECIDED, confidence=0.0)


def so_far(told: BisectReport, count: int) -> BisectReport:
    return replace(told, probes=told.probes[:count], answer=UNKNOWN)


def round_of(probe: ProbeReport) -> Round:
    return Round(subsets=(probe.indices,), purpose=probe.purpose, open=probe.open, probes_left=probe.left)


def tell(screen: BisectScreen, told: BisectReport) -> None:
    """A whole search, one probe a round."""
    screen.show_header(so_far(told, 0))
    for count, probe in enumerate(told.probes):
        screen.show_round(round_of(probe), so_far(told, count))
        screen.add_probe(probe, so_far(told, count + 1))
    screen.show_answer(told, RUN_DIR)
    screen.close()


def screen_on(stream: Screen, **environ: str) -> BisectScreen:
    return BisectScreen(stream, environ={"COLUMNS": "100", **environ}, clock_s=lambda: 0.0)


def test_without_a_terminal_a_search_is_plain_lines(golden: Golden) -> None:
    stream = Screen(tty=False)
    screen = screen_on(stream)
    tell(screen, SINGLE)
    assert screen.trouble == []
    golden("bisect.plain.txt", stream.getvalue())


def test_a_stream_that_is_not_utf_8_gets_ascii(golden: Golden) -> None:
    stream = Screen(tty=False, encoding="ascii")
    tell(screen_on(stream), SINGLE)
    assert stream.getvalue().isascii()
    golden("bisect.plain.ascii.txt", stream.getvalue())


def test_a_search_that_runs_shows_what_a_stored_one_does() -> None:
    stream = Screen(tty=False)
    tell(screen_on(stream), SINGLE)
    running = [line for line in stream.getvalue().splitlines() if line]
    stored = [line for line in stored_lines(SINGLE, RUN_DIR, 100) if line]
    # Before the first failure nobody knows that it hangs.
    assert running[0] == stored[0]
    assert running[1:] == stored[1:]


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_means_plain_lines_on_a_terminal_too(environ: dict[str, str]) -> None:
    plain, asked = Screen(tty=False), Screen(tty=True)
    tell(screen_on(plain), SINGLE)
    tell(screen_on(asked, **environ), SINGLE)
    assert asked.getvalue() == plain.getvalue()


def test_on_a_terminal_the_running_line_stands_below_the_rows_and_leaves_nothing() -> None:
    stream = Screen(tty=True)
    screen = BisectScreen(stream, environ={**COLOUR, "COLUMNS": "100", "LINES": "40"}, clock_s=lambda: 0.0)
    screen.show_header(so_far(SINGLE, 0))
    for count, probe in enumerate(SINGLE.probes[:4]):
        screen.show_round(round_of(probe), so_far(SINGLE, count))
        screen.add_probe(probe, so_far(SINGLE, count + 1))
    screen.show_round(round_of(SINGLE.probes[4]), so_far(SINGLE, 4))
    screen.settle()
    glass = Glass(100)
    glass.write(stream.getvalue())
    assert [line for line in glass.shown() if line][-1].startswith("  layers [0,12) → [6,9), about")
    screen.close()
    glass = Glass(100)
    glass.write(stream.getvalue())
    assert glass.cursor_is_visible
    assert not [line for line in glass.shown() if "about" in line]
    assert [line for line in glass.shown() if line][-1].startswith("  4  [6,12) → [6,9)")


def test_the_row_of_a_probe_waits_for_the_round_that_says_what_is_left() -> None:
    stream = Screen(tty=False)
    screen = screen_on(stream)
    screen.show_header(so_far(SINGLE, 0))
    probe = SINGLE.probes[2]
    screen.show_round(round_of(probe), so_far(SINGLE, 2))
    screen.add_probe(probe, so_far(SINGLE, 3))
    screen.settle()
    assert "[0,12)" not in stream.getvalue()
    screen.show_round(replace(round_of(probe), open=(3, 12)), so_far(SINGLE, 3))
    screen.settle()
    assert "[0,12) → [3,12)" in stream.getvalue()


def test_probes_side_by_side_are_shown_as_they_end() -> None:
    stream = Screen(tty=False)
    screen = screen_on(stream)
    screen.show_header(so_far(SINGLE, 0))
    both = Round(
        subsets=(frozenset(), frozenset(range(12))), purpose=SINGLE.probes[0].purpose, open=(0, 12), probes_left=0
    )
    screen.show_round(both, so_far(SINGLE, 0))
    screen.add_probe(SINGLE.probes[1], so_far(SINGLE, 2))
    screen.add_probe(SINGLE.probes[0], so_far(SINGLE, 2))
    screen.close()
    assert [line.split()[0] for line in stream.getvalue().splitlines() if "control" in line] == ["2", "1"]


def test_probes_of_one_round_are_followed_by_the_next_round() -> None:
    first = replace(SINGLE.probes[3], n=1)
    probes = (first, replace(first, n=2), replace(SINGLE.probes[4], n=3))
    told = replace(SINGLE, probes=probes)
    assert [one.step for one in rows(told)] == ["[6,12) → [6,9)", "[6,12) → [6,9)", "[6,9) → [7,9)"]


def test_a_stream_that_breaks_costs_the_lines_and_is_told() -> None:
    stream = Screen(tty=False)
    stream.close()
    screen = screen_on(stream)
    tell(screen, SINGLE)
    assert {item.what for item in screen.trouble} == {"output through BisectScreen"}


def test_hostile_text_cannot_steer_the_terminal() -> None:
    stream = Screen(tty=False)
    screen = screen_on(stream)
    tell(screen, hostile())
    screen.note(POISON)
    screen.on_interrupt(1)
    screen.close()
    assert screen.trouble == []
    assert set("\x1b\x9b\x07\x00\r\u202e").isdisjoint(stream.getvalue())


def test_an_interruption_says_how_to_go_on() -> None:
    stream = Screen(tty=False)
    screen = screen_on(stream)
    screen.on_interrupt(1)
    screen.on_interrupt(2)
    screen.close()
    assert stream.getvalue().splitlines() == [
        "  interrupted: ending this probe; the same command continues the search",
        "  interrupted twice: killing the processes now; the same command continues the search",
    ]


def test_in_a_log_a_long_wait_has_one_line_and_on_a_terminal_it_stands_below_the_running_probe() -> None:
    waiting = Waiting(no_progress_s=12.0, until_s=60.0, was_proven=False, limit="open_wait_s")
    shown = {}
    for tty in (False, True):
        stream = Screen(tty=tty)
        screen = screen_on(stream, **({"TERM": "xterm"} if tty else {}))
        screen.show_header(so_far(SINGLE, 0))
        screen.show_round(round_of(SINGLE.probes[0]), so_far(SINGLE, 0))
        screen.show_wait(1, waiting)
        screen.show_wait(1, None)
        screen.show_wait(1, waiting)
        screen.settle()
        shown[tty] = (
            screen.frame(),
            stream.getvalue().count("probe 1: no progress for 12 s: the hang is proven at 60 s"),
        )
        screen.add_probe(SINGLE.probes[0], so_far(SINGLE, 1))
        screen.show_round(round_of(SINGLE.probes[1]), so_far(SINGLE, 1))
        assert len(screen.frame()) == 1
        screen.close()
        assert screen.trouble == []
    assert [said for _, said in shown.values()] == [1, 0]
    assert ["the hang is proven at 60 s" in line for line in shown[True][0]] == [False, True]
