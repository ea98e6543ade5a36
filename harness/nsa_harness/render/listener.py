"""Listeners follow a run; a listener that fails does not harm the run."""

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
    """Receives the events of a run, one at a time and in order; only `interrupted` may come in between.

    A subclass overrides the methods for the events that it needs. With parallel attempts the calls come from several
    threads, and the attempts alternate. `attempt` is the name of the attempt's directory, as in `Outcome.dir`.
    """

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None: ...

    def on_launch(self, spec: RunSpec) -> None: ...

    def on_phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Say where the ranks are. Called at every poll of the watch, even if nothing changed."""

    def on_first_snapshot(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:
        """Show where the ranks of a running job are when nsa-harness attaches to it."""

    def on_stall(self, attempt: str, text: str) -> None:
        """Report a stall, which may still end."""

    def on_progress_again(self, attempt: str, text: str) -> None:
        """Report that a stall has ended."""

    def on_interrupt(self, count: int) -> None:
        """Report the `count`-th Ctrl-C or TERM. May be called in a signal handler: must not lock or write."""

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None: ...

    def on_done(self, report: Report, run_dir: Path) -> None: ...

    def close(self) -> None:
        """Leave the screen in order. May be called twice, and at any time."""


def notify(listeners: Sequence[Listener], tell: Callable[[Listener], None]) -> tuple[Trouble, ...]:
    """Call `tell` for every listener. Return the failures; one listener's failure does not affect the others."""
    trouble = []
    for listener in listeners:
        try:
            tell(listener)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            trouble.append(Trouble(what=f"output through {type(listener).__name__}", why=why))
    return tuple(trouble)


@dataclass(kw_only=True)
class Broadcast:
    """Calls all listeners, one event at a time, whichever thread it comes from."""

    listeners: tuple[Listener, ...]
    # Reentrant: the handler of Ctrl-C may interrupt the main thread inside a call.
    lock: threading.RLock = field(default_factory=threading.RLock)
    lost_terminal: Callable[[], None] = lambda: None  # called for each write to a terminal that is gone

    def __call__(self, tell: Callable[[Listener], None]) -> None:
        with self.lock:
            trouble = notify(self.listeners, tell)
        if any(failure.why.startswith(_LOST) for failure in trouble):
            self.lost_terminal()


_LOST = f"OSError: [Errno {errno.EIO}]"
