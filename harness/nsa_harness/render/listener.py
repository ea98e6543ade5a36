"""Listener: what a run tells whoever follows it, and how one that fails is kept from harming the run."""

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
    """Called one call at a time, in the order in which things happen; `interrupted` alone may come in between.

    One that overrides a method hears of that, and of nothing else. With several attempts at once the calls come from
    several threads, and the attempts alternate. `attempt` is the name of the attempt's directory, as in `Outcome.dir`.
    """

    def plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None: ...

    def launched(self, spec: RunSpec) -> None: ...

    def phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Where the ranks are. Called as often as the watch looks, also when nothing changed."""

    def looked(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:
        """Where the ranks of a job stand that is found running, before anything is known of it."""

    def suspect(self, attempt: str, text: str) -> None:
        """A stall: it may move again."""

    def released(self, attempt: str, text: str) -> None:
        """What was suspected moves again."""

    def interrupted(self, count: int) -> None:
        """Ctrl-C or TERM, for the `count`-th time. May come from a signal handler: takes no lock, writes nothing."""

    def outcome(self, outcome: Outcome, run_dir: Path) -> None: ...

    def done(self, report: Report, run_dir: Path) -> None: ...

    def close(self) -> None:
        """Leave the screen in order. Safe to call twice and at any time."""


def notify(listeners: Sequence[Listener], tell: Callable[[Listener], None]) -> tuple[Trouble, ...]:
    """Tell every listener. A listener that raises costs only itself; what it could not be told is returned."""
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
    """Speaks to all listeners, of one thing at a time whatever thread it comes from."""

    listeners: tuple[Listener, ...]
    # Reentrant: the handler of Ctrl-C speaks while the main thread may be speaking.
    lock: threading.RLock = field(default_factory=threading.RLock)
    lost_terminal: Callable[[], None] = lambda: None  # called for each word that its terminal is not there to take

    def __call__(self, tell: Callable[[Listener], None]) -> None:
        with self.lock:
            trouble = notify(self.listeners, tell)
        if any(one.why.startswith(_LOST) for one in trouble):
            self.lost_terminal()


_LOST = f"OSError: [Errno {errno.EIO}]"
