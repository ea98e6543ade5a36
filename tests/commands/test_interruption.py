"""What ends a run from outside: Ctrl-C, TERM, QUIT, a hang-up, and a terminal that is gone."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsa_harness.commands.session import Interruption, interruptible
from nsa_harness.render.experiments.screen import BisectScreen
from nsa_harness.render.listener import Broadcast, Listener


@contextmanager
def interrupted(*listeners: Listener) -> Iterator[tuple[Interruption, Broadcast]]:
    broadcast = Broadcast(listeners=listeners)
    with interruptible(broadcast) as interruption:
        yield interruption, broadcast


@pytest.fixture(autouse=True)
def _as_in_the_foreground() -> Iterator[None]:
    """nohup and a shell's `&` have the tests ignore what they are about."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_each_way_to_end_a_run_is_an_interruption_that_the_report_outlives(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interrupted() as (interruption, _):
        signal.raise_signal(number)
        assert interruption.count == 1
    assert signal.getsignal(number) is before


def test_a_hang_up_that_a_shell_passes_on_again_is_no_second_wish() -> None:
    with interrupted() as (interruption, _), interruption.watching():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interruption.count == 1


def test_a_second_ctrl_c_leaves_the_watching_at_once_and_never_what_follows() -> None:
    with interrupted() as (interruption, _):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interruption.watching():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # while the attempt is judged
        assert interruption.count == 3


def test_what_nohup_has_made_the_program_ignore_it_ignores() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted() as (interruption, _):
            signal.raise_signal(signal.SIGHUP)
            assert interruption.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


class Screen(Listener):
    """Writes to a terminal as it is told."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def on_stall(self, attempt: str, text: str) -> None:
        os.write(self._terminal, f"{attempt}: {text}\n".encode())


def test_a_terminal_that_is_gone_ends_a_run_as_a_signal_does() -> None:
    person, program = pty.openpty()
    with interrupted(Screen(program)) as (interruption, broadcast):
        broadcast(lambda one: one.on_stall("a", "quiet"))
        assert interruption.count == 0
        os.close(person)
        broadcast(lambda one: one.on_stall("a", "quiet"))
        assert interruption.count == 1
    os.close(program)


def test_a_bisection_whose_terminal_is_gone_without_a_signal_is_told_so() -> None:
    person, program = pty.openpty()
    with interrupted() as (interruption, _), os.fdopen(program, "w", closefd=False) as stream:
        screen = BisectScreen(stream, live=False)
        screen.lost_terminal = interruption.lost_terminal
        screen.note("goes on")
        screen.settle()
        assert interruption.count == 0
        os.close(person)
        screen.note("nobody reads this")
        screen.settle()
        screen.note("nor this")
        assert interruption.count == 1
        screen.close()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), program)  # for what the stream still holds
    os.close(program)
