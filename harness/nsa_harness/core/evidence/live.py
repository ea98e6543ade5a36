"""The current progress of a running attempt, and its estimated remaining time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.stored_keys import stored_as

STILL_S = 300.0  # longest time without output; CI systems end a job that prints nothing for ten minutes


@stored_as(no_progress_s="quiet_s")
@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """The current progress of one rank in a running attempt."""

    rank: int
    phase: str
    step: int  # optimizer step in progress, 1-based
    no_progress_s: float | None  # time since the latest progress event; None = no event yet
    rss_bytes: int | None  # highest resident memory so far
    module: str | None  # the module whose forward or backward the rank is in


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The current progress of all ranks in a running attempt."""

    elapsed_s: float  # since the launch
    deadline_s: float | None  # None = no deadline
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, kw_only=True)
class FirstSnapshot:
    """A group of ranks that were at the same location in a job's first snapshot."""

    ranks: tuple[int, ...]
    blocked_in: str  # "barrier", "all_reduce (DDP)" or "read in load"; "running" if the ranks do not wait
    place: str  # "train.py:6"; empty = no line of the program is known
    function: str
    idle_s: float | None  # time since the training thread last ran, the minimum over these ranks; None = unknown
    cpu_s: float | None  # CPU time of the process so far, the maximum over these ranks; None = unknown
    age_s: float  # time since the job was started


@dataclass(frozen=True, kw_only=True)
class ProgressNews:
    """The progress that the last printed line about an attempt showed, which decides when the next is printed."""

    phase: str
    milestone: int
    at_s: float  # seconds since the launch


def next_news(last: ProgressNews | None, phase: str, progress: Progress) -> ProgressNews | None:
    """Return the progress to print in the next line about an attempt, or None if no line is due.

    A line is printed if the phase has changed since `last`, if the slowest rank has reached step 1, 2, 5, 10, 20, 50
    and so on, or if nothing was printed for `STILL_S` seconds.
    """
    word = phase.partition(" ")[0]
    step = milestone(min((rank.step for rank in progress.ranks), default=0)) if word == "step" else 0
    now = ProgressNews(phase=word, milestone=step, at_s=progress.elapsed_s)
    if last is None or word != last.phase or step > last.milestone:
        return now
    return now if progress.elapsed_s - last.at_s >= STILL_S else None


def furthest_phase(before: str | None, phase: str) -> str:
    """Return the later of two phases ("launch", "step N" or "finish"), so that shown progress never goes backwards."""
    return max(before or phase, phase, key=_phase_order)


def _phase_order(phase: str) -> tuple[int, int]:
    word, _, step = phase.partition(" ")
    return _STAGES.index(word) if word in _STAGES else len(_STAGES), int(step) if step.isdecimal() else 0


_STAGES = ("launch", "step", "finish")


def milestone(step: int) -> int:
    """Return the largest number among 1, 2, 5, 10, 20, 50, ... that is at most `step`, or 0 if there is none."""
    if step < 1:
        return 0
    unit: int = 10 ** (len(str(step)) - 1)
    return max(factor * unit for factor in (1, 2, 5) if factor * unit <= step)


def time_left_s(took_s: Sequence[float], running_s: Sequence[float], waiting: int) -> float | None:
    """Return an estimate of the seconds until all runs have finished, or None if unknown.

    `took_s` are the durations of the finished runs, `running_s` the elapsed times of the running ones, and `waiting` is
    the number of runs that have not started. Each run is expected to take as long as the mean of the finished runs,
    with as many runs in parallel as now. There is no estimate before the first run has finished, if no run is left, or
    if no run is waiting and the running ones already take longer than the mean.
    """
    if not took_s or not (running_s or waiting):
        return None
    mean_s = sum(took_s) / len(took_s)
    rest_s = [max(mean_s - elapsed_s, 0.0) for elapsed_s in running_s]
    share_s = (sum(rest_s) + waiting * mean_s) / max(len(running_s), 1)
    return max([share_s, *rest_s]) or None
