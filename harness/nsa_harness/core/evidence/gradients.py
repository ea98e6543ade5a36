"""Read from printed traces which parameters received a gradient, and in which order."""

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
    """The gradients and DDP buckets in one rank's traces, with counts of None if gradients were not traced."""

    gradient_count: int | None  # number of parameters with a gradient in the last traced step
    missing_count: int | None  # number of parameters without a gradient in that step
    missing_parameters: tuple[str, ...]  # names of parameters without a gradient in any step, in order of appearance
    buckets: tuple[tuple[int, str], ...]  # (elements, dtype) of each of DDP's buckets


def trace_lines(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log that trace gradients, DDP buckets or modules."""
    return (line for line in log if _TRACE.match(line))


def read_traces(lines: Sequence[str]) -> RankTraces:
    """Return the gradients and DDP buckets that a rank's trace lines report."""
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

# Optimizer step -> names of the gradients in the order in which they were ready. A missing step has the order of the
# step before it.
Orders = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class OrderDifference:
    """The first gradient that became ready in a different order on one rank than on most others."""

    step: int
    rank: int
    position: int  # from 1, among the gradients that both ranks had
    name: str  # the gradient at this position on `rank`
    expected: str  # the gradient at this position on rank `other`
    other: int  # a rank with the most frequent order


def read_orders(records: Iterable[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Return the order in which gradients became ready in each optimizer step, from records {"step", "arrived"}."""
    orders: dict[int, tuple[str, ...]] = {}
    for record in records:
        step, names = record.get("step"), record.get("arrived")
        if isinstance(step, int) and isinstance(names, list) and len(orders) < _MAX_STEPS:
            orders[step] = tuple(str(name)[:200] for name in names[:_MAX_NAMES])
    return orders


@stored_as(difference="differs")
@dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The result of comparing the order of DDP buckets between ranks."""

    count: int  # largest number of buckets in one step
    difference: OrderDifference | None  # None = the order is the same on every rank


def read_bucket_orders(records: Iterable[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Return the order of DDP buckets, such as "bucket 0", in each step, from records {"step", "buckets"}."""
    orders: dict[int, tuple[str, ...]] = {}
    for record in records:
        step, buckets = record.get("step"), record.get("buckets")
        if isinstance(step, int) and isinstance(buckets, list) and len(orders) < _MAX_STEPS:
            numbers = [bucket.get("bucket") for bucket in buckets[:_MAX_NAMES] if isinstance(bucket, dict)]
            orders[step] = tuple(f"bucket {number}" for number in numbers if isinstance(number, int))
    return orders


def compare_bucket_order(ranks: Mapping[int, Orders]) -> BucketOrder | None:
    """Compare the order of DDP buckets between ranks. Return None if fewer than two ranks traced buckets."""
    orders_of = {rank: orders for rank, orders in ranks.items() if orders}
    if len(orders_of) < 2:
        return None
    count = max(len(order) for orders in orders_of.values() for order in orders.values())
    return BucketOrder(count=count, difference=first_order_difference(orders_of))


def first_order_difference(ranks: Mapping[int, Orders]) -> OrderDifference | None:
    """Return the first gradient that became ready in a different order on some rank, or None if there is none.

    Each rank is compared with the order of most ranks. Only gradients that both ranks have are compared, because a
    missing gradient is a separate finding. If there are only two ranks, their orders cannot show which of them is
    wrong; the higher rank is returned.
    """
    orders_of = {rank: orders for rank, orders in sorted(ranks.items()) if orders}
    for step in sorted({step for orders in orders_of.values() for step in orders}):
        now = {rank: _at(orders, step) for rank, orders in orders_of.items()}
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
    """Return the first position at which two orders differ, and the two names there, or None if they agree."""
    own_names, common_names = set(order), set(common)
    pairs = zip(
        [name for name in order if name in common_names], [name for name in common if name in own_names], strict=False
    )
    return next(
        ((number, name, expected) for number, (name, expected) in enumerate(pairs, start=1) if name != expected), None
    )
