"""The writer: one thread that draws, at a bounded rate, on terminals that shrink, stop and break."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

import pytest
from glass import Glass
from render_samples import PASSED
from rich.cells import cell_len
from test_live_view import COLOUR, MANY, lively, seen
from test_render_terminal import PROGRESS, RUN_DIR, Screen

from nsa_harness.render.listener import notify
from nsa_harness.render.terminal.live_view import MAX_RANKS
from nsa_harness.render.terminal.screen import outcome_lines
from nsa_harness.render.terminal.stream import REDRAW_S
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK


def test_a_view_that_fails_costs_itself_and_is_told() -> None:
    stream = Screen(tty=True)
    broken = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ=COLOUR, clock_s=lambda: float("nan"))
    broken.on_phase("one", "step 1", replace(PROGRESS, elapsed_s="no number"))  # type: ignore[arg-type]
    broken.settle()
    trouble = notify([broken], lambda one: one.on_phase("one", "step 2", PROGRESS))
    assert [item.what for item in trouble] == ["output through Terminal"]
    assert notify([broken], lambda one: one.on_outcome(PASSED, RUN_DIR)) != ()
    broken.close()
    assert "\n".join(outcome_lines(PASSED, 80)).split("\n")[-1] in seen(stream).shown()


class Blocked(Screen):
    """A terminal whose reader has stopped reading, as after Ctrl-S."""

    def __init__(self) -> None:
        super().__init__(tty=True)
        self.reads = threading.Event()
        self.is_written = threading.Event()

    def write(self, text: str) -> int:
        self.is_written.set()
        assert self.reads.wait(60)
        return super().write(text)


def test_a_terminal_that_nobody_reads_holds_up_no_run() -> None:
    stream = Blocked()
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ=COLOUR)
    terminal.on_phase("one", "step 1", PROGRESS)
    assert stream.is_written.wait(60)
    terminal.on_phase("one", "step 2", PROGRESS)
    terminal.on_outcome(replace(PASSED, dir="one"), RUN_DIR)
    assert stream.getvalue() == ""
    stream.reads.set()
    terminal.close()
    assert seen(stream).shown()[-2] == "PASS  ddp_onestep   4.6 s"


class Counted(Screen):
    """Counts the frames, and says when there are enough."""

    def __init__(self, enough: int) -> None:
        super().__init__(tty=True)
        self.frames: list[float] = []
        self.enough = threading.Event()
        self._number = enough

    def write(self, text: str) -> int:
        if "\x1b[?7l" in text:
            self.frames.append(time.monotonic())
        if len(self.frames) >= self._number:
            self.enough.set()
        return super().write(text)


def test_however_often_the_watch_looks_a_frame_is_drawn_at_most_five_times_a_second() -> None:
    stream = Counted(enough=6)
    terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ=COLOUR)
    elapsed_s = 0.0
    while not stream.enough.is_set():
        elapsed_s += 0.1
        terminal.on_phase("one", "step 1", replace(PROGRESS, elapsed_s=elapsed_s))
    terminal.close()
    between_s = [later - earlier for earlier, later in zip(stream.frames, stream.frames[1:], strict=False)]
    assert min(between_s) > REDRAW_S * 0.9


def test_a_frame_of_four_attempts_costs_a_small_part_of_the_time_between_two() -> None:
    _, terminal = lively(columns=120, rows=60)
    for name in ("one", "two", "three", "four"):
        terminal.on_phase(name, "step 1", replace(MANY, ranks=MANY.ranks[:8]))
    frames = 20
    began_s = time.thread_time()
    lines = [terminal.frame() for _ in range(frames)]
    cost_s = (time.thread_time() - began_s) / frames
    assert len(lines[-1]) == 4 * 9 + 1
    assert cost_s < REDRAW_S / 5  # generous: the machine of a test is busy


def resize(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def real_terminal(columns: int, rows: int) -> Iterator[tuple[int, TextIO]]:
    """The side a person looks at, and the side a program writes to."""
    person, program = pty.openpty()
    resize(program, columns, rows)
    try:
        with os.fdopen(program, "w", encoding="utf-8") as stream:
            yield person, stream
    finally:
        os.close(person)


def read_until(person: int, what: str) -> str:
    text = b""
    while what.encode() not in text:
        text += os.read(person, 65536)
    return text.decode()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_real_terminal_is_asked_for_its_size_before_each_frame(columns: int) -> None:
    with real_terminal(columns, 12) as (person, stream):
        terminal = Terminal(stream, version="0.1.0", playbook=PLAYBOOK, environ={"TERM": "xterm", "COLUMNS": "500"})
        terminal.on_phase("first", "step 1", MANY)
        glass = Glass(columns)
        glass.write(read_until(person, "\x1b[?7h"))
        assert len(glass.lines) == 11 - 1 or len(glass.lines) == MAX_RANKS + 2
        assert max(map(cell_len, glass.lines)) < columns
        resize(stream.fileno(), 30, 6)
        terminal.on_phase("second", "step 2", MANY)
        narrow = Glass(30)
        narrow.write(read_until(person, "second").rpartition("\x1b[?7l")[2])
        assert len(narrow.lines) <= 5
        terminal.close()
        assert read_until(person, "\x1b[?25h").endswith("\x1b[?25h")
