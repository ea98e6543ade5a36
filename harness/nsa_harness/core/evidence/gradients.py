"""Read the gradients that the ranks traced: which parameters got one, in which bucket and order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_harness.core.stored_keys import stored_as

_TRACE = re.compile(r"^(?:\[GRAD-TRACE\] |  - MISSING: |\[DDP\] |\[MODULE-BWD\] )")
_GRADIENTS = re.compile(r"^\[GRAD-TRACE\] after_backward_step(\d+) arrived=(\d+) missing=(\d+)$")
_MISSING = re.compile(r"^  - MISSING: (\S.*)$")
_BUCKET = re.compile(r"^\[DDP\] rank=(\d+) bucket_elems=(\d+) dtype=(\S+)$")


@stored_as(gradient_count="arrived", missing_count="missing")
@dataclass(frozen=True, kw_only=True)
class RankTraces:
    """The trace of one rank."""

    gradient_count: int | None  # in the last traced step
    missing_count: int | None
    missing_parameters: tuple[str, ...]  # over all steps, in order of appearance
    buckets: tuple[tuple[int, str], ...]  # (elements, dtype)


def trace_lines(log: Iterable[str]) -> Iterator[str]:
    return (line for line in log if _TRACE.match(line))


def read_traces(lines: Sequence[str]) -> RankTraces:
    gradients = [match for line in lines if (match := _GRADIENTS.match(line))]
    names = [match[1] for line in lines if (match := _MISSING.match(line))]
    buckets = [(int(match[2]), match[3]) for line in lines if (match := _BUCKET.match(line))]
    last = gradients[-1] if gradients else None
    return RankTraces(
        gradient_count=int(last[2]) if last else None,
        missing_count=int(last[3]) if last else None,
        missing_parameters=tuple(dict.fromkeys(names)),
        buckets=tuple(buckets),
    )


_MAX_STEPS = 4096
_MAX_NAMES = 100_000

Orders = Mapping[int, tuple[str, ...]]  # by step; a missing step has the order of the step before


@dataclass(frozen=True, kw_only=True)
class OrderDifference:
    """In `step` the gradients of `rank` came in another order than on most ranks."""

    step: int
    rank: int
    position: int  # 1-based, among the gradients that both had
    name: str
    expected: str  # the gradient at this position on rank `other`
    other: int


def read_orders(records: Iterable[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Return the orders from lines {"step", "arrived"}; lines of another form are ignored."""
    orders: dict[int, tuple[str, ...]] = {}
    for record in records:
        step, arrived = record.get("step"), record.get("arrived")
        if isinstance(step, int) and isinstance(arrived, list) and len(orders) < _MAX_STEPS:
            orders[step] = tuple(str(name)[:200] for name in arrived[:_MAX_NAMES])
    return orders


@stored_as(difference="differs")
@dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The order in which DDP's buckets became ready, compared over the ranks that traced it."""

    count: int  # the most buckets in one step
    difference: OrderDifference | None  # None: the same on every rank


def read_bucket_orders(records: Iterable[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Return the buckets from lines {"step", "buckets": [{"bucket"}]}, in the order in which they became ready."""
    orders: dict[int, tuple[str, ...]] = {}
    for record in records:
        step, buckets = record.get("step"), record.get("buckets")
        if isinstance(step, int) and isinstance(buckets, list) and len(orders) < _MAX_STEPS:
            numbers = [bucket.get("bucket") for bucket in buckets[:_MAX_NAMES] if isinstance(bucket, dict)]
            orders[step] = tuple(f"bucket {number}" for number in numbers if isinstance(number, int))
    return orders


def compare_bucket_order(ranks: Mapping[int, Orders]) -> BucketOrder | None:
    """Return the comparison; None if fewer than two ranks traced buckets."""
    traced = {rank: orders for rank, orders in ranks.items() if orders}
    if len(traced) < 2:
        return None
    count = max(len(order) for orders in traced.values() for order in orders.values())
    return BucketOrder(count=count, difference=first_order_difference(traced))


def first_order_difference(ranks: Mapping[int, Orders]) -> OrderDifference | None:
    """Return the first step and rank with an order that differs from most ranks' order; of two ranks, the higher one.

    Only gradients that both ranks have are compared, because a missing gradient is another finding.
    """
    traced = {rank: orders for rank, orders in sorted(ranks.items()) if orders}
    for step in sorted({step for orders in traced.values() for step in orders}):
        now = {rank: _at(orders, step) for rank, orders in traced.items()}
        common = Counter(now.values()).most_common(1)[0][0] if now else ()
        other = next(rank for rank, order in now.items() if order == common)
        for rank, order in now.items():
            if (first := _first_difference(order, common)) is not None:
                position, name, expected = first
                return OrderDifference(
                    step=step, rank=rank, position=position, name=name, expected=expected, other=other
                )
    return None


def _at(orders: Orders, step: int) -> tuple[str, ...]:
    return orders[max((earlier for earlier in orders if earlier <= step), default=min(orders))]


def _first_difference(order: tuple[str, ...], common: tuple[str, ...]) -> tuple[int, str, str] | None:
    """Return (position, name, expected name) of the first gradient out of order; None if the orders agree."""
    here, there = set(order), set(common)
    pairs = zip([name for name in order if name in there], [name for name in common if name in here], strict=False)
    return next(
        ((number, name, expected) for number, (name, expected) in enumerate(pairs, start=1) if name != expected), None
    )
