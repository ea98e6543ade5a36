"""Lanes: the picture of an outcome, one lane a rank, as shares of a bar for the page to draw.

Of many ranks those that stand alike share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.report import RUNS_ON, Outcome, Status
from nsa_harness.texts import words

SHOWN = 16
APART = 8  # ranks that have a lane each
_CAPTION = 72  # characters; the table of ranks has the whole


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a bar, from its left end on."""

    percent: float
    kind: str  # "launch", "moving", "still" or "steps": a class of the style sheet


@dataclass(frozen=True, kw_only=True)
class Lane:
    label: str
    stretches: tuple[Stretch, ...]
    caption: str
    role: str  # "culprit", "waits" or "ended": a class of the style sheet


@dataclass(frozen=True, kw_only=True)
class Lanes:
    title: str
    lanes: tuple[Lane, ...]
    ends: tuple[str, str]  # what the left and the right end of each bar stand for
    omitted: int  # lanes that are not drawn, never a culprit's


def lanes(outcome: Outcome) -> Lanes | None:
    """Of a HANG its time, of any other the steps. None where nothing of that is known."""
    still = {row.rank: row.no_progress_s for row in outcome.standings if row.no_progress_s is not None}
    in_time = outcome.verdict.status is Status.HANG and bool(still)
    if not in_time and not any(outcome.last_step.values()):
        return None
    ranks = sorted({*outcome.last_step, *still, *(row.rank for row in outcome.standings)})
    culprits = set(outcome.culprit.ranks) if outcome.culprit else set()
    alike: dict[object, list[int]] = {}
    for rank in ranks:
        alike.setdefault((rank in culprits, _caption(outcome, rank, None)) if len(ranks) > APART else rank, []).append(
            rank
        )
    shown = sorted(sorted(alike.values(), key=lambda some: some[0] not in culprits)[:SHOWN])
    until_s = max(outcome.timing.wall_s - (outcome.timing.teardown_s or 0.0), *still.values(), 0.1) if in_time else 0.0
    most = max((step for step in outcome.last_step.values() if step), default=0)
    return Lanes(
        title="Ranks over time" if in_time else "Steps of each rank",
        lanes=tuple(
            Lane(
                label=words.ranks(some),
                stretches=_time(outcome, until_s, _longest(still, some)) if in_time else _steps(outcome, some[0], most),
                caption=_caption(outcome, some[0], _longest(still, some)),
                role="culprit" if some[0] in culprits else "waits" if some[0] in outcome.victims else "ended",
            )
            for some in shown
        ),
        ends=_ends(outcome, until_s) if in_time else ("", f"step {most}"),
        omitted=len(alike) - len(shown),
    )


def _longest(still: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    return max((still[rank] for rank in ranks if rank in still), default=None)


def _ends(outcome: Outcome, until_s: float) -> tuple[str, str]:
    begins = "start" if outcome.timing.launch_s is None else "launch"
    return begins, f"{words.seconds(until_s)}: {'last look' if outcome.ended.startswith(RUNS_ON) else 'ended'}"


def _time(outcome: Outcome, until_s: float, still_s: float | None) -> tuple[Stretch, ...]:
    if still_s is None:
        return ()
    launch_s = min(outcome.timing.launch_s or 0.0, until_s - still_s)
    parts = (("launch", launch_s), ("moving", until_s - still_s - launch_s), ("still", still_s))
    return tuple(Stretch(percent=round(100 * part_s / until_s, 1), kind=kind) for kind, part_s in parts if part_s > 0)


def _steps(outcome: Outcome, rank: int, most: int) -> tuple[Stretch, ...]:
    step = outcome.last_step.get(rank)
    return (Stretch(percent=round(100 * step / most, 1), kind="steps"),) if step and step > 0 else ()


def _caption(outcome: Outcome, rank: int, still_s: float | None) -> str:
    step = outcome.last_step.get(rank)
    done = "no step known" if step is None else f"{words.plural(step, 'step')} done"
    row = next((row for row in outcome.standings if row.rank == rank), None)
    if row is None:
        status = outcome.exit_codes.get(rank)
        return f"{done} · {'had not ended' if status is None else f'ended with {words.exit_word(status)}'}"
    still = "" if still_s is None else f"{words.seconds(still_s)} "
    waits = f", waits for {words.middle(row.waits_for, _CAPTION // 2)}" if row.waits_for else ""
    where = f"in {row.blocked_in}" if outcome.verdict.status is Status.HANG else row.blocked_in
    return f"{done} · {still}{words.middle(where, _CAPTION)}{waits}"
