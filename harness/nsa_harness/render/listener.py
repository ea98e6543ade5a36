"""Listeners, which receive the events of a run. An exception in a listener does not affect the run."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report, Trouble


class Listener:
    """Receiver of the events of a run. A subclass overrides the methods for the events that it needs.

    The methods are called one at a time and in order; only `on_interrupt` may be called during another call. If
    attempts run in parallel, the calls come from several threads and the events of the attempts are mixed. `attempt` is
    the name of the attempt's directory, as in `Outcome.dir`.
    """

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        """Receive the list of runs before the first launch, with those that this machine cannot run."""

    def on_launch(self, spec: RunSpec) -> None:
        """Receive the specification of a run that is about to be launched."""

    def on_phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Receive the progress of the ranks. Called each time the ranks are polled, even if nothing changed."""

    def on_first_snapshot(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:
        """Receive the first stack snapshot of a running job, taken when nsa-harness attaches to the job."""

    def on_stall(self, attempt: str, text: str) -> None:
        """Receive the description of a stall: no rank makes progress, but it is not proven to be a hang."""

    def on_progress_again(self, attempt: str, text: str) -> None:
        """Receive the end of a stall: a rank has made progress again."""

    def on_interrupt(self, count: int) -> None:
        """Receive the `count`-th SIGINT (Ctrl-C) or SIGTERM.

        May be called by a signal handler, so it must not take a lock or write to a stream.
        """

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        """Receive the outcome of one attempt."""

    def on_done(self, report: Report, run_dir: Path) -> None:
        """Receive the whole report after the last attempt."""

    def close(self) -> None:
        """Restore the terminal. May be called at any time, and more than once."""


def notify(listeners: Sequence[Listener], call: Callable[[Listener], None]) -> tuple[Trouble, ...]:
    """Run `call` for every listener. Return the exceptions; they do not affect the other listeners."""
    trouble = []
    for listener in listeners:
        try:
            call(listener)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            trouble.append(Trouble(what=f"output through {type(listener).__name__}", why=reason))
    return tuple(trouble)


@dataclass(kw_only=True)
class Broadcast:
    """Function that passes an event to all listeners. Only one event is passed at a time, also from several threads."""

    listeners: tuple[Listener, ...]
    # Reentrant: the signal handler for Ctrl-C may interrupt the main thread while it holds the lock.
    lock: threading.RLock = field(default_factory=threading.RLock)
    lost_terminal: Callable[[], None] = lambda: None  # called when a listener writes to a terminal that has been closed

    def __call__(self, call: Callable[[Listener], None]) -> None:
        with self.lock:
            trouble = notify(self.listeners, call)
        if any(failure.why.startswith(_TERMINAL_CLOSED) for failure in trouble):
            self.lost_terminal()


_TERMINAL_CLOSED = f"OSError: [Errno {errno.EIO}]"
