"""The table of what was measured on each rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from nsa_harness.core.report import Outcome, RankSummary
from nsa_harness.texts import words

_VITAL_HEAD = (
    "rank:",
    "loss:",
    "gradients",
    "buckets",
    "median step:",
    "90 % of steps:",
    "own part:",
    "longest gap:",
    "peak memory:",
)


def vital_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table of each rank's measurements, without columns that have no value.

    If there are many ranks, there is a row for some of those at fault, and one for the median and the highest value.
    """
    summaries = outcome.rank_summaries
    rows = [_vital_row(str(row.rank), row) for row in summaries]
    if len(summaries) > words.MANY_RANKS:
        at_fault = words.marked_culprits(outcome)
        rows = [_vital_row(str(row.rank), row) for row in summaries if row.rank in at_fault][:_MAX_VITAL_RANKS]
        rows += [_vital_row(name, _over_ranks(choose, summaries)) for name, choose in _OVER_RANKS]
    columns = [column for column in range(len(_VITAL_HEAD)) if any(row[column] != words.UNKNOWN for row in rows)]
    return tuple(_VITAL_HEAD[c] for c in columns), [tuple(row[c] for c in columns) for row in rows]


def _vital_row(name: str, row: RankSummary) -> tuple[str, ...]:
    return (
        name,
        words.loss(row.loss),
        row.gradients or words.UNKNOWN,
        row.buckets or words.UNKNOWN,
        *(_step_time(duration_s) for duration_s in (row.step_s, row.step_p90_s, row.own_s)),
        words.seconds(row.longest_gap_s),
        words.size(row.peak_rss_bytes),
    )


_MAX_VITAL_RANKS = 8
_OVER_RANKS: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
    ("median of all", statistics.median_high),
    ("highest of all", max),
)


def _over_ranks(choose: Callable[[list[float]], float], summaries: Sequence[RankSummary]) -> RankSummary:
    """Return the measurements that `choose` selects, in each column, from those of all ranks."""

    def of(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return choose(known) if known else None

    peak_bytes = of(row.peak_rss_bytes for row in summaries)
    return replace(
        summaries[0],
        loss=of(row.loss for row in summaries),
        gradients=None,
        buckets=None,
        step_s=of(row.step_s for row in summaries),
        step_p90_s=of(row.step_p90_s for row in summaries),
        own_s=of(row.own_s for row in summaries),
        longest_gap_s=of(row.longest_gap_s for row in summaries),
        peak_rss_bytes=None if peak_bytes is None else int(peak_bytes),
    )


def _step_time(duration_s: float | None) -> str:
    return words.UNKNOWN if duration_s is None else f"{duration_s:.3f} s"
