"""The time limits of a run, such as the maximal time without progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Evidence, StatusFile
from nsa_harness.core.plan import Limits

STALL_FLOOR_S = 5.0
STALL_FACTOR = 3.0  # multiple of the run's longest pause in the same phase
BUSY_FLOOR_S = 60.0
BUSY_FACTOR = 10.0  # multiple of the longest finished step
OPEN_WAIT_FLOOR_S = 300.0
OPEN_WAIT_FACTOR = 10.0  # multiple of the run's longest pause
START_S = 120.0  # for the interpreter, imports, rendezvous and the first use of the device
BLIND_STALL_S = 20.0  # without a status file, only I/O and stacks show progress, and both pause in a healthy run

_SET_UP = {"init_process_group", "new_group"}


def has_started(status_file: StatusFile | None) -> bool:
    """Return whether the rank has finished starting up.

    It has if it recorded a training event, or called a collective other than those that create a process group.
    """
    if status_file is None:
        return False
    trains = status_file.latest_training_event is not None
    return trains or any(call.op not in _SET_UP and not call.op.startswith(protocol.WAIT) for call in status_file.calls)


def last_progress_s(status_file: StatusFile) -> float:
    """Return the time of the rank's last progress, in seconds since the launch."""
    latest = status_file.latest_event
    changes_s = (status_file.collectives_changed_s or 0.0, status_file.device_changed_s or 0.0)
    return max(status_file.created_s, latest.at_s if latest else 0.0, *changes_s)


def current_limits(fixed: Limits, rank_status_files: Iterable[StatusFile | None], grown_s: float = 0.0) -> Limits:
    """Return the time limits that currently apply to a run, derived from its own pauses so far.

    Values that are set in `fixed` are kept. The others grow with the run's own pauses: a run may pause several times as
    long as before in the same phase without a suspicion. All are set except perhaps the deadline. `grown_s` is the
    lowest stall limit after a suspicion that was wrong.
    """
    status_files = [status_file for status_file in rank_status_files if status_file is not None]
    phases = {status_file.latest_event.kind for status_file in status_files if status_file.latest_event}
    pauses_s = [(kind, pause_s) for status_file in status_files for kind, pause_s in status_file.gaps_s.items()]
    longest_s = max((pause_s for _, pause_s in pauses_s), default=0.0)
    longest_in_phase_s = max((pause_s for kind, pause_s in pauses_s if kind in phases), default=0.0)
    floor_s = STALL_FLOOR_S if status_files else BLIND_STALL_S
    step_s = max((_longest_step_s(status_file) for status_file in status_files), default=0.0)
    return Limits(
        stall_s=_value(fixed.stall_s, max(floor_s, STALL_FACTOR * longest_in_phase_s, grown_s)),
        busy_s=_value(fixed.busy_s, max(BUSY_FLOOR_S, BUSY_FACTOR * step_s)),
        open_wait_s=_value(fixed.open_wait_s, max(OPEN_WAIT_FLOOR_S, OPEN_WAIT_FACTOR * longest_s)),
        start_s=_value(fixed.start_s, START_S),
        deadline_s=fixed.deadline_s,
    )


def with_deadline_from(limits: Limits, began_s: float | None) -> Limits:
    """Return the limits with a deadline that excludes start-up.

    `began_s` is the time when every rank had finished start-up, which depends on the launcher and not on the program.
    If it is None, the deadline counts from the launch: some rank is still starting, or the job was already running when
    it was found.
    """
    if began_s is None or limits.deadline_s is None:
        return limits
    return replace(limits, deadline_s=began_s + limits.deadline_s)


def final_limits(evidence: Evidence) -> Limits:
    """Return the time limits that applied when a run ended. The deadline is in seconds since the launch."""
    is_own_launch = not evidence.is_observed and not evidence.is_attached
    return with_deadline_from(evidence.limits, evidence.launch_s if is_own_launch else None)


def _value(fixed: float | None, automatic: float) -> float:
    return automatic if fixed is None else fixed


def _longest_step_s(status_file: StatusFile) -> float:
    times = [at_s for _, at_s in status_file.steps_s]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
