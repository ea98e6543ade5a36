"""Rules about what is wrong in a run that says nothing of it: numbers, replicas, memory, an idle device, a dirty end.

They speak beside the verdict, a PASS included. Each has a doubt it must respect: what a program may do on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from nsa_harness.core.diagnosis.case import Case, Explanation, at, counted, explained, layer_of, shorten
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.grades import Seen
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.evidence.evidence import RankEvidence
from nsa_harness.core.evidence.looks import Broken, LastWords, Looks, Memory, Part, Replica, ReplicaLook, Written
from nsa_harness.core.report import Place, Status

_BAD_LOSSES = 3  # in a row, up to the last one: a batch that is skipped is no lost run
_LOOKS_WITHOUT = 4  # at gradients, before "never" is said
# Growth: over at least this many steps, seen in so many looks, in the later half as fast as before it.
_GROWTH_STEPS, _GROWTH_LOOKS = 32, 8
_GROWTH_BYTES, _GROWTH_SHARE = 48 << 20, 0.15
_FEWER_STEPS, _LARGE_SHARE, _STEADY = 20, 0.5, 0.98  # of less steps more is asked: growth, and no look without it
_GOES_ON = 0.6  # of the earlier slope
_RISING = 0.8  # of all pairs of looks
_GIB, _MIB = 1 << 30, 1 << 20


@rule(RulePhase.SILENT, Cause.NAN, outranks=("replica_divergence",))
def nan(case: Case) -> Explanation | None:
    """Parameters that are not finite at the end, or losses that are not, up to the last."""
    seen = {rank.rank: rank.looks for rank in case.evidence.ranks if rank.looks is not None}
    lost = {rank: one for rank, one in seen.items() if one.parameters or (one.loss and one.bad_in_a_row >= _BAD_LOSSES)}
    if not lost:
        return None
    ranks, first, told = _first_broken(lost)
    name = next((one.parameters.names[0] for one in lost.values() if one.parameters and one.parameters.names), None)
    into = f"; {name} and other parameters hold it at the end" if name else ""
    return explained(
        Cause.NAN,
        f"{told}{into}",
        ranks=ranks,
        place=first.place or (Place(parameter=name, layer=layer_of(name)) if name else None),
        # What parameters hold on several ranks at once may have begun on one of them.
        seen=Seen.PART if not name else Seen.RECORD if first.place or len(ranks) == 1 else Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


def _first_broken(lost: dict[int, Looks]) -> tuple[tuple[int, ...], Broken, str]:
    """The ranks whose loss was broken before any other's; where no loss was, those of the parameters."""
    losses = {rank: one.loss for rank, one in lost.items() if one.loss is not None}
    parameters = {rank: one.parameters for rank, one in lost.items() if one.parameters is not None}
    first_loss = min((one.step for one in losses.values()), default=None)
    first_held = min((one.step for one in parameters.values()), default=None)
    if first_loss is not None and (first_held is None or first_loss <= first_held):
        ranks = tuple(sorted(rank for rank, one in losses.items() if one.step == first_loss))
        first = losses[ranks[0]]
        noun, was = ("loss", "was") if len(ranks) == 1 else ("losses", "were")
        return (
            ranks,
            first,
            (
                f"the {noun} of {ranks_text(ranks)} {was} {first.value} in step {first_loss}{at(first.place)}"
                f"{'' if len(ranks) == len(lost) else ', before any other rank was'}"
            ),
        )
    assert first_held is not None
    ranks = tuple(sorted(rank for rank, one in parameters.items() if one.step == first_held))
    first = parameters[ranks[0]]
    together = "; gradients are averaged, so it may have begun on one of them" if len(ranks) > 1 else ""
    return (
        ranks,
        first,
        (
            f"the parameters of {ranks_text(ranks)} hold {first.value} since step {first_held} at the latest, and no"
            f" loss before had it: it came out of a backward pass{together}"
        ),
    )


@rule(RulePhase.SILENT, Cause.REPLICA_DIVERGENCE, outranks=("silent_checkpoint",))
def replica_divergence(case: Case) -> Explanation | None:
    """Replicas that DDP made equal, or the program, differ at the last look that all ranks have."""
    partings = [found for replicas in _replicas(case.evidence.ranks) if (found := first_parting(replicas)) is not None]
    if not partings:
        return None
    first = min(partings, key=lambda one: one.round)
    name = first.names[0] if first.names else None
    return explained(
        Cause.REPLICA_DIVERGENCE,
        f"the replicas differ since {_moment(first)}: {_departed(first)};"
        f" at the last look {_named(first.names)} differ{'s' if len(first.names) == 1 else ''} {_amount(first.apart)}",
        ranks=first.ranks,
        place=Place(parameter=name, layer=layer_of(name)) if name else None,
        seen=Seen.RECORD if first.told and first.wrapped else Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in first.ranks),
        advice=None if first.wrapped else _UNLIKE if first.at == "made" else _UNWRAPPED,
    )


_UNWRAPPED = (
    "Call the model through DistributedDataParallel, or all_reduce the gradient of every parameter before each step."
    " What one rank alone changes, broadcast. If each rank is to learn a model of its own, this is none."
)


_UNLIKE = (
    "Broadcast every parameter from one rank before the first step, or seed all ranks alike before the model is made:"
    " gradients that are reduced keep equal models equal, and others apart."
)


@rule(RulePhase.SILENT, Cause.SHARED_FILE, outranks=("orphan_process",))
def shared_file(case: Case) -> Explanation | None:
    """Ranks that began one file anew, each: who comes last has written it, or parts of several stand in it."""
    writers: dict[str, dict[int, Written]] = {}
    for rank in case.evidence.ranks:
        for one in rank.looks.wrote if rank.looks else ():
            writers.setdefault(one.path, {})[rank.rank] = one
    several = {path: found for path, found in writers.items() if len(found) > 1}
    if not several:
        return None
    path, found = next(iter(several.items()))
    place = found[min(found)].place
    more = "" if len(several) == 1 else f", and {counted(len(several) - 1, 'more file')}"
    return explained(
        Cause.SHARED_FILE,
        f"{ranks_text(tuple(sorted(found)))} each wrote {shorten(path, 120)} from its beginning{at(place)}{more}",
        ranks=tuple(sorted(found)),
        place=place,
        seen=Seen.PART,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in sorted(found)),
    )


def _replicas(ranks: Sequence[RankEvidence]) -> list[dict[int, Replica]]:
    """Each model of each group of ranks, as those ranks hold it; only where all of them told."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Replica]] = {}
    for rank in ranks:
        for one in rank.looks.replicas if rank.looks else ():
            groups.setdefault((one.number, one.ranks), {})[rank.rank] = one
    return [held for (_, members), held in groups.items() if set(members) == set(held)]


def _moment(first: Parting) -> str:
    if first.at == "made":
        return "DDP's constructor" if first.wrapped else "the start, before the first step"
    if first.at == "begun":
        if first.round == 0:
            return "the time before the first step"
        return f"the time between step {first.round} and the next forward"
    if first.at == "before":
        return f"step {first.round} or earlier"
    return f"the end of step {first.round}"


def _departed(first: Parting) -> str:
    ranks = ranks_text(first.ranks)
    if first.told == "outside":
        return f"{ranks} changed parameters outside of an optimizer step, and the others did not"
    if first.told == "extra step":
        return f"{ranks} took another number of optimizer steps than backward passes"
    if first.at == "made" and not first.wrapped:
        return (
            f"{ranks} began with {'other values' if first.told else 'values of their own'}, and reduce gradients alike"
        )
    if first.told == "fewer":
        return f"{ranks} came out of it unlike the others"
    return f"{ranks} came out of it unequal, and which one departed cannot be told"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more parts" if len(names) > 2 else "")


def _amount(apart: float) -> str:
    return "in being finite" if apart == float("inf") else f"by {apart:.2g} of the size"


@rule(RulePhase.SILENT, Cause.MEMORY_GROWTH, outranks=("dirty_exit",))
def memory_growth(case: Case) -> Explanation | None:
    """Memory that grows with the steps until the end, as fast late as early."""
    growing = [
        (rank.rank, kind, growth)
        for rank in case.evidence.ranks
        if rank.looks is not None
        for kind, of in (("host", _anonymous), ("GPU", _allocated))
        if (growth := _growth(rank.looks.memory, of)) is not None
    ]
    if not growing:
        return None
    _, kind, (slope, grown, begin, end) = max(growing, key=lambda one: one[2][1])
    ranks = tuple(sorted({rank for rank, one, _ in growing if one == kind}))
    return explained(
        Cause.MEMORY_GROWTH,
        f"the {kind} memory of {ranks_text(ranks)} grows by {_bytes(slope)} a step and does not level off:"
        f" {_bytes(grown)} more from step {begin} to {end}",
        ranks=ranks,
        seen=Seen.PART,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


def _anonymous(point: Memory) -> int | None:
    return point.anonymous_bytes


def _allocated(point: Memory) -> int | None:
    return point.gpu_bytes


def _growth(memory: Sequence[Memory], of: Callable[[Memory], int | None]) -> tuple[float, float, int, int] | None:
    """Slope a step, bytes in all, first and last step; None where it does not grow, or levels off."""
    points = [(one.step, amount) for one in memory if (amount := of(one)) is not None]
    last = points[-1][0] if points else 0
    points = [(step, amount) for step, amount in points if step >= last / 8]  # what warms up does so before
    if last < _FEWER_STEPS or len(points) < _GROWTH_LOOKS:
        return None
    late = [point for point in points if point[0] >= last / 2]
    early = [point for point in points if point[0] <= last / 2]
    if len(late) < 4 or len(early) < 4:
        return None
    slope, before = _slope(late), _slope(early)
    grown = points[-1][1] - points[0][1]
    share, steady = (_GROWTH_SHARE, _RISING) if last >= _GROWTH_STEPS else (_LARGE_SHARE, _STEADY)
    enough = grown >= max(_GROWTH_BYTES, share * points[0][1])
    rising = [b > a for (_, a), (_, b) in combinations(points, 2)]
    if not enough or slope <= 0 or slope < _GOES_ON * before or sum(rising) < steady * len(rising):
        return None
    return slope, float(grown), points[0][0], last


def _slope(points: Sequence[tuple[int, int]]) -> float:
    """Of Theil and Sen: the median over all pairs, which a few outliers do not move."""
    return median((b - a) / (y - x) for (x, a), (y, b) in combinations(points, 2) if y > x)


def _bytes(amount: float) -> str:
    if amount >= _GIB:
        return f"{amount / _GIB:.1f} GiB"
    return f"{amount / _MIB:.1f} MiB" if amount >= _MIB / 10 else f"{amount / 1024:.1f} KiB"


@rule(RulePhase.SILENT, Cause.NO_GRADIENT, outranks=("memory_growth",))
def no_gradient(case: Case) -> Explanation | None:
    missing = sorted({name for rank in case.evidence.ranks for name in rank.traces.missing_parameters})
    if not missing:
        return _never_a_gradient(case)
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    ranks = tuple(rank.rank for rank in case.evidence.ranks if rank.traces.missing_parameters)
    return explained(
        Cause.NO_GRADIENT,
        f"{counted(len(missing), 'parameter')} received no gradient: {shown}",
        ranks=ranks,
        place=Place(parameter=missing[0], module=missing[0].rpartition(".")[0] or None, layer=layer_of(missing[0])),
        seen=Seen.FACT,
        proof=("traces.log",),
        advice="Frozen on purpose, or not reached by the loss; under DDP the second kind needs find_unused_parameters"
        " or a term of zero.",
    )


def _never_a_gradient(case: Case) -> Explanation | None:
    """Parameters that an optimizer is to train and whose module ran, but that no look found with a gradient."""
    without = {
        rank.rank: rank.looks
        for rank in case.evidence.ranks
        if rank.looks is not None and rank.looks.never_count and rank.looks.looks >= _LOOKS_WITHOUT
    }
    if not without:
        return _zero_gradients(case)
    names = list(dict.fromkeys(name for looks in without.values() for name in looks.never))
    most = max(looks.never_count for looks in without.values())
    shown = ", ".join(names[:3]) + (f" and {most - 3} more" if most > 3 else "")
    used = next((looks.never_place for looks in without.values() if looks.never_place), None) or Place()
    return explained(
        Cause.NO_GRADIENT,
        f"{counted(most, 'parameter')} of the optimizer never had a gradient at any look, although the module ran:"
        f" {shown}{f'; used{at(used)}' if used.file else ''}",
        ranks=tuple(sorted(without)),
        place=replace(used, parameter=names[0], module=names[0].rpartition(".")[0] or None, layer=layer_of(names[0])),
        seen=Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in sorted(without)),
        advice="What the module returns does not reach the loss: look for detach, no_grad, .item() or .data behind it."
        " If that is meant, leave its parameters out of the optimizer.",
    )


def _zero_gradients(case: Case) -> Explanation | None:
    """Every gradient that an optimizer was given was zero, at every look: it changes nothing."""
    still = {
        rank.rank: rank.looks
        for rank in case.evidence.ranks
        if rank.looks is not None and rank.looks.still_count and rank.looks.still_looks >= _LOOKS_WITHOUT
    }
    if not still:
        return _without_an_optimizer(case)
    most = max(still.values(), key=lambda looks: looks.still_count)
    return explained(
        Cause.NO_GRADIENT,
        f"the gradients of all {counted(most.still_count, 'parameter')} of the optimizer were zero at each of"
        f" {most.still_looks} looks on {ranks_text(tuple(sorted(still)))}",
        ranks=tuple(sorted(still)),
        seen=Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in sorted(still)),
        advice="Nothing is learnt there: look for a loss that is multiplied by zero, a mask or a clamp that cuts"
        " everything, activations that are dead, or a loss too small for the type of its gradients.",
    )


def _without_an_optimizer(case: Case) -> Explanation | None:
    """Gradients as a backward pass leaves them: all zero on a rank, or missing where the program steps by hand.

    Nobody has said there what is to be trained: the probe leaves out what the program runs or writes as if it were not.
    """
    seen = [
        (rank.rank, one)
        for rank in case.evidence.ranks
        for one in (rank.looks.arrived if rank.looks else ())
        if one.looks >= _LOOKS_WITHOUT and (one.still or one.never_count)
    ]
    still = [(rank, one) for rank, one in seen if one.still]
    if not seen:
        return None
    _, first = (still or seen)[0]
    alike = [(rank, one) for rank, one in still or seen if one.model == first.model]
    ranks = tuple(sorted({rank for rank, _ in alike}))
    # A part that every rank keeps out by detach alone looks as one that is detached by mistake.
    chosen = not still and set(ranks) == {rank.rank for rank in case.evidence.ranks if rank.looks}
    if still:
        claim = (
            f"each backward pass that was looked at, {first.looks} of them, left {first.model} on {ranks_text(ranks)}"
            " with gradients that were all zero"
        )
        advice = (
            "Nothing is learnt from the data of these ranks, even where gradients are summed over all: look for a loss"
            " that is multiplied by zero, or a mask or a clamp that cuts everything."
        )
    else:
        shown = ", ".join(first.never[:3]) + (f" and {first.never_count - 3} more" if first.never_count > 3 else "")
        claim = (
            f"{counted(first.never_count, 'parameter')} of {first.model} never had a gradient at any of {first.looks}"
            f" looks on {ranks_text(ranks)}, although the module ran: {shown}"
            f"{'; or they are kept out of training on purpose, by detach' if chosen else ''}"
        )
        advice = (
            "What the module returns does not reach the loss: look for detach, no_grad, .item() or .data behind it. If"
            " that is meant, set requires_grad_(False)."
        )
    name = None if still or not first.never else first.never[0]
    return explained(
        Cause.NO_GRADIENT,
        claim,
        ranks=ranks,
        place=Place(parameter=name, module=name.rpartition(".")[0] or None, layer=layer_of(name)) if name else None,
        seen=Seen.OPEN if chosen else Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
        advice=advice,
    )


@rule(RulePhase.SILENT, Cause.DIRTY_EXIT, outranks=("orphan_process",))
def dirty_exit(case: Case) -> Explanation | None:
    """An end that failed or left something behind, although every rank left with 0."""
    if case.judgement.status is not Status.PASS:
        return None
    said = [(rank.rank, words) for rank in case.evidence.ranks for words in rank.last_words]
    if not said:
        return None
    rank, first = min(said, key=lambda one: _KINDS.index(one[1].kind))
    ranks = tuple(sorted({one for one, words in said if words.kind == first.kind}))
    more = f", and {counted(len(said) - len(ranks), 'more thing')}" if len(said) > len(ranks) else ""
    return explained(
        Cause.DIRTY_EXIT,
        f"{ranks_text(ranks)} left with exit code 0, but {_left_behind(first)}{more}",
        ranks=ranks,
        place=first.place,
        seen=Seen.ENDED,
        proof=(f"rank{rank}/stderr.log",),
    )


_KINDS = ("atexit", "left", "process group")


def _left_behind(words: LastWords) -> str:
    raised = f"{shorten(words.error, 120) or 'an error'}{at(words.place)}"
    return {
        "atexit": f"a function called at exit ended with {raised}",
        "left": f"{words.name} objects were left to the resource tracker",
        "process group": "its process group was never destroyed",
    }.get(words.kind, words.name)


MATERIAL = 1e-4  # of the size of the parameters: more than another order of summation explains


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Replicas that differ at their last common look, and since when."""

    ranks: tuple[int, ...]  # that changed what the others did not, or that are fewer; else all
    told: str  # how the ranks were told apart: "outside", "extra step", "fewer", "" = not
    at: str  # of the first look at which they differ; "before" where no look before it is kept
    round: int
    names: tuple[str, ...]  # of parameters that differ at the last look
    apart: float  # largest difference, as a share of the size
    wrapped: bool  # in DDP


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
    wrapped = all(one.wrapped for one in replicas.values())
    if apart < MATERIAL or not (wrapped or _meant_to_be_equal(replicas, looks, common, differing)):
        return None
    ranks, told = _who(looks, common, first)
    at = "before" if first == common[0] and first[0] != "made" else first[0]
    return Parting(
        ranks=ranks,
        told=told,
        at=at,
        round=first[1],
        names=names,
        apart=apart,
        wrapped=wrapped,
    )


def _meant_to_be_equal(
    replicas: Mapping[int, Replica],
    looks: Mapping[int, Mapping[_Key, ReplicaLook]],
    common: Sequence[_Key],
    differing: Sequence[_Key],
) -> bool:
    """Outside of DDP: equal up to some step and never again, after a broadcast or a step that changed all alike.

    Equal at first alone is one seed: parts of one model, or models of their own, begin so too. What is equal again
    between two differences is averaged now and then, and what differs only at the end was put there for an evaluation.
    What was never equal is meant to be where every gradient is summed over all ranks.
    """
    parted = common.index(differing[0])
    if len(differing) < len(common) - parted or differing[0][0] == "over":
        return False
    if not parted:
        return len(common) >= _LOOKS_WITHOUT and all(one.reduced for one in replicas.values())
    of_one = next(iter(looks.values()))
    equal = {of_one[key].checksum for key in common[:parted]}
    return len(equal) > 1 or (bool(equal) and all(one.broadcast for one in replicas.values()))


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
