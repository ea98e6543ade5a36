"""Observes a job that is not ours: a proof is reported and may be taken back, and the job runs on.

Decides with the same functions as Watch; what differs is what follows from a decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.scenario.observed_job import with_ranks
from nsa_harness.core.verdict.proof import Proof
from nsa_harness.supervisor.observe.guest import Guest
from nsa_harness.supervisor.observe.ranks import GuestRanks
from nsa_harness.supervisor.observe.relay import Relay
from nsa_harness.supervisor.store.adapters import json_text
from nsa_harness.supervisor.store.rundir import write_document
from nsa_harness.supervisor.watch.watch import Watch

_ASKED_S = 60.0  # a job that ends badly so soon after a signal was ended by it; torchrun takes 30 s for its ranks


@dataclass(kw_only=True)
class Observation(Watch):
    """One attempt of an observed job: from its ranks' start to their end, or to the ranks that take their place."""

    relay: Relay
    on_ending: Callable[[Ending], None]  # HANG proven, or its deadline passed, and the job is still there
    ends_it: bool  # --on-hang=kill

    def __post_init__(self) -> None:
        super().__post_init__()
        self.write("observed")

    @property
    def guest(self) -> Guest:
        return cast(Guest, self.guarded)

    @property
    def guest_ranks(self) -> GuestRanks:
        return cast(GuestRanks, self.ranks)

    def find_ranks(self) -> GuestRanks:
        return GuestRanks(spec=self.spec, guarded=self.guarded, camera=self.camera)

    def resolved_spec(self) -> RunSpec:
        """With as many ranks as were seen; written down, as the report is about it."""
        self.spec = with_ranks(self.spec, self.guest_ranks.count)
        write_document(self.attempt.spec, json_text(self.spec, indent=1) + "\n")
        return self.spec

    def suspicion(self, now_s: float, limits: Limits) -> Ending | None:
        if self.spec.ranks < self.guest_ranks.count:
            self.resolved_spec()
        if self.guest_ranks.restarted:
            return Ending.STALL if self.standing else Ending.RESTARTED
        return super().suspicion(now_s, limits)

    def proven(self, proof: Proof) -> Ending | None:
        if self.ends_it:
            return Ending.STALL
        self.standing = proof
        self._tell(Ending.STALL)
        return None

    def overdue(self) -> Ending | None:
        if self.ends_it:
            return Ending.DEADLINE
        self._tell(Ending.DEADLINE)
        self.spec = replace(self.spec, limits=replace(self.spec.limits, deadline_s=None))
        return None

    def release(self, progress_s: float) -> None:
        self.standing = None
        super().release(progress_s)

    def over(self) -> Ending:
        """The command has left. A proof that stands goes before what ended the job in the end."""
        if self.standing:
            return Ending.STALL
        return Ending.INTERRUPTED if self._was_asked_to_end() else Ending.EXITED

    def close(self, ending: Ending) -> None:
        """What stood when a HANG was proven is written once, at that moment."""
        if not (self.standing and ending is Ending.STALL):
            super().close(ending)

    def _tell(self, ending: Ending) -> None:
        """The report of this moment, made from what a report of the end would be made from."""
        super().close(ending)
        self.guest.bring_boards(Path(self.attempt.boards))
        self.on_ending(ending)

    def _was_asked_to_end(self) -> bool:
        asked_ns = self.relay.asked_to_end_ns
        if asked_ns is None or not ended_as_asked(self.guest.status(), asked_ns, time.monotonic_ns()):
            return False
        self.write("asked_to_end", t_s=(asked_ns - self.guarded.origin_ns) / 1e9)
        return True


def ended_as_asked(status: int, asked_ns: int, ended_ns: int) -> bool:
    """A bad end soon after somebody asked for one; a good end is the job's own, and a late one has another reason."""
    return status != 0 and ended_ns - asked_ns <= _ASKED_S * 1e9
