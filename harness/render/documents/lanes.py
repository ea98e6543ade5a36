"""Lanes: the picture of an outcome, one lane a rank, as numbers for the template to draw."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.report import Outcome
from nsa_harness.render import words

SHOWN = 16
LANE_HEIGHT = 42
STEPS_X, STEPS_WIDTH = 76, 300
QUIET_X, QUIET_WIDTH = 392, 300
WIDTH = 700


@dataclass(frozen=True, kw_only=True)
class Lane:
    label: str
    y: int
    steps_width: float  # 0 = no step known
    steps: str
    quiet_width: float
    quiet: str
    caption: str
    role: str  # "culprit", "waits" or "ended": a class of the style sheet


@dataclass(frozen=True, kw_only=True)
class Lanes:
    lanes: tuple[Lane, ...]
    height: int
    omitted: int  # ranks without a lane, never a culprit


def lanes(outcome: Outcome) -> Lanes | None:
    """None where nothing is known to draw."""
    quiet = _quiet(outcome)
    if not quiet and not any(step is not None for step in outcome.last_step.values()):
        return None
    ranks = sorted({*outcome.last_step, *quiet, *(row.rank for row in outcome.standings)})
    culprits = set(outcome.culprit.ranks) if outcome.culprit else set()
    shown = sorted(sorted(ranks, key=lambda rank: rank not in culprits)[:SHOWN])
    drawn = tuple(_lane(outcome, rank, index, quiet, culprits) for index, rank in enumerate(shown))
    return Lanes(lanes=drawn, height=LANE_HEIGHT * len(drawn) + 24, omitted=len(ranks) - len(drawn))


def _lane(outcome: Outcome, rank: int, index: int, quiet: dict[int, float], culprits: set[int]) -> Lane:
    step, quiet_s = outcome.last_step.get(rank), quiet.get(rank)
    most_steps = max((value for value in outcome.last_step.values() if value), default=1)
    longest_s = max(quiet.values(), default=0.0) or 1.0
    role = "culprit" if rank in culprits else "waits" if rank in outcome.victims else "ended"
    return Lane(
        label=f"rank {rank}",
        y=LANE_HEIGHT * index + 24,
        steps_width=_scaled(step or 0, most_steps, STEPS_WIDTH),
        steps="no step known" if step is None else f"step {step}",
        quiet_width=_scaled(quiet_s or 0.0, longest_s, QUIET_WIDTH),
        quiet="" if quiet_s is None else words.seconds(quiet_s),
        caption=_caption(outcome, rank),
        role=role,
    )


def _quiet(outcome: Outcome) -> dict[int, float]:
    standing = {row.rank: row.quiet_s for row in outcome.standings}
    vital = {row.rank: row.longest_quiet_s for row in outcome.vitals}
    return {rank: quiet_s for rank, quiet_s in {**vital, **standing}.items() if quiet_s is not None}


def _caption(outcome: Outcome, rank: int) -> str:
    for row in outcome.standings:
        if row.rank == rank:
            waits = f", waits for {row.waits_for}" if row.waits_for else ""
            return _short(f"in {row.stands_in}{waits}")
    status = outcome.exit_codes.get(rank)
    return "had not ended" if status is None else f"ended with {words.exit_word(status)}"


def _short(text: str) -> str:
    return text if len(text) <= 52 else text[:51] + "…"


def _scaled(value: float, largest: float, width: int) -> float:
    """At least a sliver for what is more than nothing."""
    return max(round(width * min(value / largest, 1.0), 1), 2.0) if value > 0 else 0.0
