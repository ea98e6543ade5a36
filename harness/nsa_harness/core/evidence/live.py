"""The progress of a running attempt for the screen, and an estimate of the time that a plan still takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.stored_keys import stored_as

STILL_S = 300.0  # longest time without output; CI systems end a job that prints nothing for ten minutes


@stored_as(no_progress_s="quiet_s")
@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """One rank at this moment, from its status file."""

    rank: int
    phase: str
    step: int  # optimizer step in progress, 1-based
    no_progress_s: float | None  # age of the latest event; None = no event yet
    rss_bytes: int | None  # the peak so far
    module: str | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    elapsed_s: float
    deadline_s: float | None  # None = no deadline
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, kw_only=True)
class FirstSnapshot:
    """Ranks that are blocked at the same place in the first snapshot of a running job.

    Only the next snapshot shows whether they make progress.
    """

    ranks: tuple[int, ...]
    blocked_in: str  # "barrier", "all_reduce (DDP)", "read in load"; "running"
    place: str  # "train.py:6"; empty = no line of the program is known
    function: str
    idle_s: float | None  # since the training thread last ran, the shortest of these ranks; None = unknown
    cpu_s: float | None  # CPU time of the process so far, the maximum of these ranks
    age_s: float  # age of the job


@dataclass(frozen=True, kw_only=True)
class ProgressNews:
    """The last line printed about an attempt, on a terminal that keeps every line, such as a CI log."""

    phase: str
    milestone: int
    at_s: float


def next_news(last: ProgressNews | None, phase: str, progress: Progress) -> ProgressNews | None:
    """Return what to print now, or None: a new phase, a step of 1, 2, 5, 10, 20 ..., or a sign of life."""
    word = phase.partition(" ")[0]
    reached = milestone(min((rank.step for rank in progress.ranks), default=0)) if word == "step" else 0
    now = ProgressNews(phase=word, milestone=reached, at_s=progress.elapsed_s)
    if last is None or word != last.phase or reached > last.milestone:
        return now
    return now if progress.elapsed_s - last.at_s >= STILL_S else None


def milestone(step: int) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50 ... up to `step`; 0 before the first."""
    if step < 1:
        return 0
    unit: int = 10 ** (len(str(step)) - 1)
    return max(factor * unit for factor in (1, 2, 5) if factor * unit <= step)


def time_left_s(took_s: Sequence[float], running_s: Sequence[float], waiting: int) -> float | None:
    """Return an estimate: every run takes the mean of those that ended, with as many in parallel as now.

    None before the first run has ended, if nothing is left, and if a running one takes longer than any that ended.
    """
    if not took_s or not (running_s or waiting):
        return None
    mean_s = sum(took_s) / len(took_s)
    rest_s = [max(mean_s - elapsed_s, 0.0) for elapsed_s in running_s]
    share_s = (sum(rest_s) + waiting * mean_s) / max(len(running_s), 1)
    return max([share_s, *rest_s]) or None
