"""Progress: what a running attempt shows while it is watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """One rank at this moment, read from its board."""

    rank: int
    phase: str
    step: int  # optimizer step in progress, 1-based
    quiet_s: float | None  # age of the newest mark; None = no mark yet
    rss_bytes: int | None
    module: str | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    elapsed_s: float
    deadline_s: float | None  # None = no deadline
    ranks: tuple[RankProgress, ...]
