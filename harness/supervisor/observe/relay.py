"""Passes signals on to an observed job, those that it has not got already, and remembers who asked it to end.

The signals are blocked and taken one by one by a thread: only so the kernel says who sent one. A key on the terminal
reaches the whole foreground group, the job included; `kill` reaches us alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field

from nsa_harness.supervisor.capture import procfs

FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SI_KERNEL = 0x80


@dataclass(kw_only=True)
class Relay:
    """Blocks the signals from its making on; `follow` begins to pass them on."""

    before: set[signal.Signals | int] = field(default_factory=set)
    asked_to_end_ns: int | None = None  # the first time that somebody outside the job did

    def __post_init__(self) -> None:
        self.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED))

    def unblock(self) -> None:
        """In the child, before its program begins."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def follow(self, pid: int) -> None:
        """Pass on to `pid`, which is our child, as long as we live."""
        threading.Thread(target=self._run, args=(pid,), name="signals", daemon=True).start()

    def _run(self, pid: int) -> None:
        while True:
            told = signal.sigwaitinfo(FORWARDED)
            if _from_the_job(told.si_pid, pid):
                continue
            if told.si_signo in _ENDING and self.asked_to_end_ns is None:
                self.asked_to_end_ns = time.monotonic_ns()
            if told.si_code != _SI_KERNEL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, told.si_signo)


def _from_the_job(sender: int, job: int) -> bool:
    """A job that signals its own group has reached itself."""
    return sender == job or (sender != 0 and any(stat.pid == sender for stat in procfs.descendants(job)))
