"""Observes a job that is not ours: a proof is reported and may be taken back, and the job runs on.

The watch is that of a run of our own; what differs is the policy: what follows from a decision.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.scenario.observed_job import with_ranks
from nsa_harness.core.verdict.proof import Proof
from nsa_harness.supervisor.observe.observed_job import SignalForwarder, WatchedCommand
from nsa_harness.supervisor.observe.ranks import WatchedRanks
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.watch import Watch, WatchListener, WatchPolicy

_ASKED_S = 60.0  # a job that ends badly so soon after a signal was ended by it; torchrun takes 30 s for its ranks


@dataclass(kw_only=True)
class ObservedJob:
    """One attempt of an observed job: from its ranks' start to their end, or to the ranks that take their place."""

    guest: WatchedCommand
    spec: RunSpec
    attempt: AttemptDir
    audience: WatchListener
    relay: SignalForwarder
    on_ending: Callable[[Ending], None]  # HANG proven, or its deadline passed, and the job is still there
    ends_it: bool  # --on-hang=kill

    def __post_init__(self) -> None:
        policy = WatchPolicy(
            find_ranks=self._find_ranks,
            over=self._over,
            overdue=self._overdue,
            proven=self._proven,
            decide=self._decide,
            observed=True,
        )
        self.watch = Watch(
            guarded=self.guest,
            spec=self.spec,
            attempt=self.attempt,
            audience=self.audience,
            interrupted=lambda: False,
            policy=policy,
        )

    def resolved_spec(self) -> RunSpec:
        """With as many ranks as were seen; written down, as the report is about it."""
        self.watch.spec = with_ranks(self.watch.spec, self.ranks.count)
        write_spec(self.attempt, self.watch.spec)
        return self.watch.spec

    def _find_ranks(self, **parts: Any) -> WatchedRanks:
        self.ranks = WatchedRanks(**parts)
        return self.ranks

    def _decide(self, now_s: float, limits: Limits) -> Ending | None:
        if self.watch.spec.ranks < self.ranks.count:
            self.resolved_spec()
        if self.ranks.restarted:
            return Ending.STALL if self.watch.standing else Ending.RESTARTED
        return self.watch.suspicion(now_s, limits)

    def _proven(self, proof: Proof) -> Ending | None:
        if self.ends_it:
            return Ending.STALL
        self.watch.standing = proof
        self._report(Ending.STALL)
        return None

    def _overdue(self) -> Ending | None:
        if self.ends_it:
            return Ending.DEADLINE
        self._report(Ending.DEADLINE)
        spec = self.watch.spec
        self.watch.spec = replace(spec, limits=replace(spec.limits, deadline_s=None))
        return None

    def _over(self) -> Ending:
        """The command has left. A proof that stands goes before what ended the job in the end."""
        if self.watch.standing:
            return Ending.STALL
        return Ending.INTERRUPTED if self._was_asked_to_end() else Ending.EXITED

    def _report(self, ending: Ending) -> None:
        """The report of this moment, made from what a report of the end would be made from."""
        self.watch.close(ending)
        self.guest.bring_boards(Path(self.attempt.boards))
        self.on_ending(ending)

    def _was_asked_to_end(self) -> bool:
        asked_ns = self.relay.asked_to_end_ns
        if asked_ns is None or not ended_as_asked(self.guest.child.wait(), asked_ns, time.monotonic_ns()):
            return False
        self.watch.write("asked_to_end", t_s=(asked_ns - self.guest.origin_ns) / 1e9)
        return True


def ended_as_asked(status: int, asked_ns: int, ended_ns: int) -> bool:
    """A bad end soon after somebody asked for one; a good end is the job's own, and a late one has another reason."""
    return status != 0 and ended_ns - asked_ns <= _ASKED_S * 1e9


HOOK_LIMIT_S = 60.0


@dataclass(kw_only=True)
class Hook:
    """One call of --on-hang=exec's command, beside the watch: outcome on its input, a limit, failure as a sentence.

    `failed` is called from another thread, at most once.
    """

    command: str
    document: Path  # what it reads
    failed: Callable[[str], None]
    limit_s: float = HOOK_LIMIT_S

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="on-hang", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended, or met its limit."""
        self._thread.join()

    def _run(self) -> None:
        try:
            why = self._call()
        except OSError as error:
            why = str(error)
        if why:
            self.failed(why)

    def _call(self) -> str | None:
        """Why it failed. Its output goes to our stderr: stdout is the job's."""
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", self.command],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, str(self.document), os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setpgroup=0,
            setsigmask=(),  # ours are blocked, and a child would inherit that
        )
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], self.limit_s)
        os.close(descriptor)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended:
            return f"ended by us after {self.limit_s:g} s"
        return None if status == 0 else f"exit code {status}" if status > 0 else f"ended by signal {-status}"
