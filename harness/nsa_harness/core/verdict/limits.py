"""The time limits of a run, such as the maximal time without progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
CLOSED_WAIT_S = 12.0  # after this pause, snapshots are taken in any phase, because a closed wait needs no longer limit
EXIT_S = 30.0  # pause after which a finished program that is still exiting is reported as stalled
FIRST_STEPS = 2  # compilation and first allocations make these optimizer steps slow, so they belong to start-up
FIRST_CALLS = 16  # for a program without optimizer: this many collectives belong to start-up

_SET_UP = {"init_process_group", "new_group"}
_DESTROYS = "destroy_process_group"


def has_started(status_file: StatusFile | None) -> bool:
    """Return whether the rank recorded training, or a collective other than for creating a process group."""
    if status_file is None:
        return False
    trains = status_file.latest_training_event is not None
    return trains or any(call.op not in _SET_UP and not call.op.startswith(protocol.WAIT) for call in status_file.calls)


def has_done_first_steps(status_file: StatusFile) -> bool:
    """Return whether the rank has finished its first optimizer steps, or without training its first collectives."""
    if status_file.latest_training_event is not None:
        return status_file.step > FIRST_STEPS
    return bool(status_file.calls) and status_file.calls[-1].number > FIRST_CALLS


def is_exiting(status_file: StatusFile | None) -> bool:
    """Return whether the rank's program has finished: its interpreter exits, or it is destroying its process group."""
    if status_file is None:
        return False
    last_call = status_file.calls[-1] if status_file.calls else None
    destroys = last_call is not None and last_call.op == _DESTROYS and last_call.left_s is None
    return destroys or any(event.kind == "exit" for event in status_file.events)


def last_progress_s(status_file: StatusFile) -> float:
    """Return the time of the rank's last progress, in seconds since the launch."""
    latest = status_file.latest_event
    changes_s = (status_file.collectives_changed_s or 0.0, status_file.device_changed_s or 0.0)
    return max(status_file.created_s, latest.at_s if latest else 0.0, *changes_s)


def current_phases(rank_status_files: Iterable[StatusFile | None]) -> frozenset[str]:
    """Return the kind of each rank's latest progress event, or "" if no event is known."""
    latest_events = (status_file.latest_event for status_file in rank_status_files if status_file is not None)
    return frozenset(event.kind for event in latest_events if event is not None) or frozenset({""})


def without_earlier_pauses(status_file: StatusFile, earlier_s: Mapping[str, float]) -> StatusFile:
    """Return the status file without the pauses that it already had when its pauses were `earlier_s`, by phase."""
    later_s = {kind: pause_s for kind, pause_s in status_file.gaps_s.items() if pause_s > earlier_s.get(kind, 0.0)}
    return replace(status_file, gaps_s=later_s)


def current_limits(
    fixed: Limits, rank_status_files: Iterable[StatusFile | None], learned_s: Mapping[str, float] | None = None
) -> Limits:
    """Return the time limits that currently apply to a run, derived from its own pauses so far.

    Values that are set in `fixed` are kept. The others grow with the run's own pauses: a run may pause several times as
    long as before in the same phase without a suspicion. All are set except perhaps the deadline. `learned_s` has the
    lowest stall limit for each phase in which a suspicion was wrong.
    """
    status_files = [status_file for status_file in rank_status_files if status_file is not None]
    phases = current_phases(status_files)
    grown_s = max(((learned_s or {}).get(phase, 0.0) for phase in phases), default=0.0)
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
    """Return the limits with a deadline from which the time for start-up is excluded.

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
