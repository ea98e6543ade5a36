"""The current time limits of a run: how long it may make no progress, learned from its own pauses and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Evidence, StatusFile
from nsa_harness.core.plan import Limits

STALL_FLOOR_S = 5.0
STALL_FACTOR = 3.0  # times the longest pause of this run in the same phase
BUSY_FLOOR_S = 60.0
BUSY_FACTOR = 10.0  # times the longest completed step
OPEN_WAIT_FLOOR_S = 300.0
OPEN_WAIT_FACTOR = 10.0  # times the longest pause
START_S = 120.0  # interpreter, imports, rendezvous, first use of the device
BLIND_STALL_S = 20.0  # no status file: only bytes and stacks are visible, and both pause in a healthy run

_SET_UP = {"init_process_group", "new_group"}


def has_started(status_file: StatusFile | None) -> bool:
    """Whether the rank has finished start-up: it trains, or has called a collective that does not create a group."""
    if status_file is None:
        return False
    trains = status_file.latest_training_event is not None
    return trains or any(call.op not in _SET_UP and not call.op.startswith(protocol.WAIT) for call in status_file.calls)


def last_progress_s(status_file: StatusFile) -> float:
    """Return when this rank last made progress."""
    latest = status_file.latest_event
    counted = (status_file.collectives_changed_s or 0.0, status_file.device_changed_s or 0.0)
    return max(status_file.created_s, latest.at_s if latest else 0.0, *counted)


def current_limits(declared: Limits, boards: Iterable[StatusFile | None], grown_s: float = 0.0) -> Limits:
    """Return the current limits: the declared ones, and for the rest values that grow with the run's own pauses.

    A run may pause several times as long as it did before in the same phase without being suspected. `grown_s` is the
    least stall limit after a suspicion that proved wrong.
    """
    status_files = [status_file for status_file in boards if status_file is not None]
    phases = {status_file.latest_event.kind for status_file in status_files if status_file.latest_event}
    same_phase = max((gap for b in status_files for kind, gap in b.gaps_s.items() if kind in phases), default=0.0)
    longest = max((gap for b in status_files for gap in b.gaps_s.values()), default=0.0)
    floor = STALL_FLOOR_S if status_files else BLIND_STALL_S
    step_s = max((_longest_step_s(status_file) for status_file in status_files), default=0.0)
    return Limits(
        stall_s=_chosen(declared.stall_s, max(floor, STALL_FACTOR * same_phase, grown_s)),
        busy_s=_chosen(declared.busy_s, max(BUSY_FLOOR_S, BUSY_FACTOR * step_s)),
        open_wait_s=_chosen(declared.open_wait_s, max(OPEN_WAIT_FLOOR_S, OPEN_WAIT_FACTOR * longest)),
        start_s=_chosen(declared.start_s, START_S),
        deadline_s=declared.deadline_s,
    )


def with_deadline_from(limits: Limits, began_s: float | None) -> Limits:
    """Return the limits with a deadline that counts from `began_s`, when every rank had finished start-up.

    A fork starts in a fraction of torchrun's time, and neither time depends on the program. With None the deadline
    counts from the launch: a rank is still starting, or the job was found while it ran.
    """
    if began_s is None or limits.deadline_s is None:
        return limits
    return replace(limits, deadline_s=began_s + limits.deadline_s)


def final_limits(evidence: Evidence) -> Limits:
    """Return the limits in force when watching ended, with the deadline as a time after the launch."""
    ours = not evidence.is_observed and not evidence.is_attached
    return with_deadline_from(evidence.limits, evidence.launch_s if ours else None)


def _chosen(declared: float | None, automatic: float) -> float:
    return automatic if declared is None else declared


def _longest_step_s(status_file: StatusFile) -> float:
    times = [at_s for _, at_s in status_file.steps_s]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
