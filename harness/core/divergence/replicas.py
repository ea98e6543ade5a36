"""Where DDP's replicas part: since which look their parameters differ, and who changed them outside of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.looks import Part, Replica, ReplicaLook

MATERIAL = 1e-4  # of the size of the parameters: more than another order of summation explains


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Replicas that differ at their last common look, and since when."""

    ranks: tuple[int, ...]  # that changed what the others did not, or that are fewer; else all
    told: str  # how the ranks were told apart: "outside", "extra step", "fewer", "" = not
    at: str  # of the first look at which they differ; "before" where no look before it is kept
    round: int
    steps: int
    names: tuple[str, ...]  # of parameters that differ at the last look
    apart: float  # largest difference, as a share of the size


_Key = tuple[str, int]


def first_parting(replicas: Mapping[int, Replica]) -> Parting | None:
    """The parting of one model's replicas, by rank; None where they are equal in the end, or need not be."""
    if len(replicas) < 2 or any(one.hook or one.names != _any(replicas).names for one in replicas.values()):
        return None
    looks = {rank: {(look.at, look.round): look for look in one.looks} for rank, one in replicas.items()}
    common = [key for key in _order(replicas) if all(key in found for found in looks.values())]
    if not common or len({one.looks[-1].round for one in replicas.values()}) > 1:
        return None
    differing = [key for key in common if len({found[key].checksum for found in looks.values()}) > 1]
    if not differing or differing[-1] != common[-1]:
        return None
    first = common[-1]
    for key in reversed(common):
        if key not in differing:
            break
        first = key
    names, apart = _difference([replicas[rank] for rank in sorted(replicas)])
    if apart < MATERIAL:
        return None
    ranks, told = _who(looks, common, first)
    look = looks[ranks[0]][first]
    at = "before" if first == common[0] and first[0] != "made" else first[0]
    return Parting(ranks=ranks, told=told, at=at, round=first[1], steps=look.steps, names=names, apart=apart)


def _any(replicas: Mapping[int, Replica]) -> Replica:
    return next(iter(replicas.values()))


def _order(replicas: Mapping[int, Replica]) -> list[_Key]:
    """The moments in their order, as one rank had them; of a moment that came twice the later one."""
    moments = [(look.at, look.round) for look in _any(replicas).looks]
    return list(dict.fromkeys(reversed(moments)))[::-1]


def _who(
    looks: Mapping[int, Mapping[_Key, ReplicaLook]], common: Sequence[_Key], first: _Key
) -> tuple[tuple[int, ...], str]:
    """Whose parameters changed between a step and the next forward while others' did not; else who are fewer."""
    every = tuple(sorted(looks))
    place = common.index(first)
    before = common[place - 1] if place else None
    if before is not None and first[0] == "begun" and before[1] == first[1]:
        changed = [rank for rank in every if looks[rank][before].checksum != looks[rank][first].checksum]
        if 0 < len(changed) < len(every):
            return tuple(changed), "outside"
    if before is not None and first[0] == "stepped":
        taken = {rank: looks[rank][first].steps - looks[rank][before].steps for rank in every}
        pace = {rank: looks[rank][before].steps / before[1] if before[1] else 1.0 for rank in every}
        more = [rank for rank in every if taken[rank] != (first[1] - before[1]) * pace[rank]]
        if 0 < len(more) < len(every):
            return tuple(more), "extra step"
    sums = {rank: looks[rank][first].checksum for rank in every}
    (most, count), *others = Counter(sums.values()).most_common()
    if 2 * count > len(every) and others:
        return tuple(rank for rank in every if sums[rank] != most), "fewer"
    return every, ""


def _difference(replicas: Sequence[Replica]) -> tuple[tuple[str, ...], float]:
    """The parts that differ at the last look, and by how much at most."""
    names: list[str] = []
    largest = 0.0
    for number, (first_name, last_name) in enumerate(replicas[0].names):
        parts = [one.parts[number] for one in replicas if number < len(one.parts)]
        if len({part.checksum for part in parts}) > 1:
            names.append(first_name if first_name == last_name else f"{first_name} .. {last_name}")
            largest = max(largest, _apart(parts))
    return tuple(names), largest


def _apart(parts: Sequence[Part]) -> float:
    """As a share of their size; infinite where some are finite and others are not, none where none is."""
    finite = [part for part in parts if math.isfinite(part.size) and math.isfinite(part.total)]
    if len(finite) < len(parts):
        return math.inf if finite else 0.0
    size = max(max(part.size for part in parts), 1e-30)
    sizes, totals = [part.size for part in parts], [part.total for part in parts]
    return max(max(sizes) - min(sizes), max(totals) - min(totals)) / size
