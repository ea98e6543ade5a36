"""Listeners: objects that are notified of the events of a run. Their exceptions do not affect the run."""

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
    """The base class for objects that are notified of the events of a run.

    A subclass overrides the methods for the events that it needs. The methods are called one at a time and in order;
    only `on_interrupt` may be called during another call. If attempts run in parallel, the calls come from several
    threads. `attempt` is the name of the attempt's directory, as in `Outcome.dir`.
    """

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        """Handle the list of planned runs, before the first launch. It includes those that cannot run here."""

    def on_launch(self, spec: RunSpec) -> None:
        """Handle the launch of a run, just before its processes are started."""

    def on_phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Handle the latest progress of the ranks, each time they are polled, even if nothing changed."""

    def on_job(self, attempt: str, job: str, state: str, text: str) -> None:
        """Handle a new state of an attempt that an engine runs as a job, with the reason or the nodes."""

    def on_first_snapshot(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:
        """Handle the first stack snapshot of a job to which nsa-harness attaches."""

    def on_stall(self, attempt: str, text: str) -> None:
        """Handle a stall, during which no rank makes progress. `text` describes it."""

    def on_progress_again(self, attempt: str, text: str) -> None:
        """Handle the end of a stall."""

    def on_interrupt(self, count: int) -> None:
        """Handle Ctrl-C or SIGTERM. `count` is the number of these signals so far.

        A signal handler may call this method, so it must not take a lock or write to a stream.
        """

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        """Handle the outcome of an attempt that has ended."""

    def on_done(self, report: Report, run_dir: Path) -> None:
        """Handle the report of all attempts, after the last one has ended."""

    def on_answer(self, verdict: str, subject: str, lines: Sequence[str]) -> None:
        """Handle the answer of a command that launches several runs, such as "NO-GO" about "ready production".

        `lines` explain the answer; the last ones have the conclusion.
        """

    def close(self) -> None:
        """Stop the output and restore the terminal. This can be called more than once."""


def notify(listeners: Sequence[Listener], call: Callable[[Listener], None]) -> tuple[Trouble, ...]:
    """Call `call` with every listener, and return the exceptions that were raised."""
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
    """A function object that passes an event to all listeners, one event at a time."""

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
