"""Rules about what is wrong in a run that says nothing of it: numbers, replicas, memory, what it never waited for.

They speak beside the verdict, a PASS included. Each has a doubt it must respect: what a program may do on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, takewhile
from statistics import median
from typing import TypeVar

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    bytes_text,
    counted,
    layer_of,
    parameter_place,
    shorten,
)
from nsa_harness.core.diagnosis.explanation import Explanation, explained, given
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.health_samples import (
    Arrived,
    Fetched,
    GivenUp,
    HealthSamples,
    LastMessages,
    Memory,
    OverwrittenFile,
    Part,
    Replica,
    ReplicaSample,
    Unwaited,
)
from nsa_harness.core.report import Place, Status

_BAD_LOSSES = 3  # in a row, up to the last one: a batch that is skipped is no lost run
_LOOKS_WITHOUT = 4  # at gradients, before "never" is said
# Growth: over at least this many steps, seen in so many looks, in the later half as fast as before it.
_GROWTH_STEPS, _GROWTH_LOOKS = 32, 8
_GROWTH_BYTES, _GROWTH_SHARE = 48 << 20, 0.15
_FEWER_STEPS, _LARGE_SHARE, _STEADY = 20, 0.5, 0.98  # of less steps more is asked: growth, and no look without it
_GOES_ON = 0.6  # of the earlier slope
_RISING = 0.8  # of all pairs of looks
# Waiting for data: the share of the time, in each half of it; seconds in all; in how many steps; behind the first ones,
# in which everything is slow.
_WAITING, _WAITED_S, _WAITED_STEPS, _WARM_STEPS = 0.5, 5.0, 8, 2

Looked = TypeVar("Looked")
ByRank = list[tuple[int, Looked]]


def _looked(context: DiagnosisContext, of: Callable[[HealthSamples], Iterable[Looked]]) -> ByRank[Looked]:
    """What the looks at each rank found of it."""
    return [(rank.rank, one) for rank in context.evidence.ranks if rank.looks for one in of(rank.looks)]


def _any_of(
    of: Callable[[HealthSamples], Iterable[Looked]],
) -> Callable[[DiagnosisContext], tuple[ByRank[Looked]] | None]:
    """Finds what the looks at the ranks found of it, unless that is nothing."""

    def found(context: DiagnosisContext) -> tuple[ByRank[Looked]] | None:
        looked = _looked(context, of)
        return (looked,) if looked else None

    return found


def _any_looks(
    wanted: Callable[[HealthSamples], object],
) -> Callable[[DiagnosisContext], tuple[ByRank[HealthSamples]] | None]:
    """Finds the looks at those ranks of which that is true."""
    return _any_of(lambda looks: [looks] if wanted(looks) else [])


def _noted(
    cause: Cause,
    ranks: Iterable[int],
    claim: str,
    *,
    place: Place | None = None,
    evidence: EvidenceKind = EvidenceKind.EFFECT,
    advice: str | None = None,
    left_open: tuple[str, ...] = (),
) -> Explanation:
    """What the looks at these ranks prove."""
    some = tuple(sorted(set(ranks)))
    proof = tuple(f"rank{rank}/looks.jsonl" for rank in some)
    return explained(
        cause, claim, ranks=some, place=place, evidence=evidence, proof=proof, advice=advice, left_open=left_open
    )


def _is_broken(looks: HealthSamples) -> bool:
    return looks.parameters is not None or (looks.loss is not None and looks.bad_in_a_row >= _BAD_LOSSES)


@given(_any_looks(_is_broken))
def nan(_: DiagnosisContext, broken: ByRank[HealthSamples]) -> Explanation:
    """Parameters that are not finite at the end, or losses that are not, up to the last."""
    losses = {rank: one.loss for rank, one in broken if one.loss is not None}
    parameters = {rank: one.parameters for rank, one in broken if one.parameters is not None}
    # In one step the loss comes before the parameters: its backward pass is what reached them.
    first = min((*losses.values(), *parameters.values()), key=lambda one: one.step)
    ranks = [rank for rank, one in losses.items() if one.step == first.step]
    if ranks:
        noun, was = ("loss", "was") if len(ranks) == 1 else ("losses", "were")
        alone = "" if len(ranks) == len(broken) else ", before any other rank was"
        told = f"the {noun} of {ranks_text(ranks)} {was} {first.value} in step {first.step}{at(first.place)}{alone}"
    else:
        ranks = [rank for rank, one in parameters.items() if one.step == first.step]
        together = "; gradients are averaged, so it may have begun on one of them" if len(ranks) > 1 else ""
        told = (
            f"the parameters of {ranks_text(ranks)} hold {first.value} since step {first.step} at the latest, and no"
            f" loss before had it: it came out of a backward pass{together}"
        )
    name = next((one.names[0] for one in parameters.values() if one.names), None)
    return _noted(
        Cause.NAN,
        ranks,
        f"{told}; {name} and other parameters hold it at the end" if name else told,
        place=first.place or (Place(parameter=name, layer=layer_of(name)) if name else None),
        # What parameters hold on several ranks at once may have begun on one of them.
        evidence=EvidenceKind.PART
        if not name
        else EvidenceKind.RECORD
        if first.place or len(ranks) == 1
        else EvidenceKind.EFFECT,
    )


def _partings(context: DiagnosisContext) -> tuple[list[Parting]] | None:
    """Of each model of each group of ranks, as those ranks hold it; only where all of them told."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Replica]] = {}
    for rank, one in _looked(context, lambda looks: looks.replicas):
        groups.setdefault((one.number, one.ranks), {})[rank] = one
    told = (held for (_, members), held in groups.items() if set(members) == set(held))
    partings = [found for held in told if (found := first_parting(held)) is not None]
    return (partings,) if partings else None


@given(_partings)
def replica_divergence(_: DiagnosisContext, partings: Sequence[Parting]) -> Explanation:
    """Replicas that DDP made equal, or the program, differ at the last look that all ranks have."""
    first = min(partings, key=lambda one: one.round)
    name = first.names[0] if first.names else None
    return _noted(
        Cause.REPLICA_DIVERGENCE,
        first.ranks,
        f"the replicas differ since {_moment(first)}: {_departed(first)};"
        f" at the last look {_some(first.names, len(first.names), shown=2, of=' parts')}"
        f" differ{'s' if len(first.names) == 1 else ''} {_amount(first.apart)}",
        place=Place(parameter=name, layer=layer_of(name)) if name else None,
        evidence=EvidenceKind.RECORD if first.told and first.wrapped else EvidenceKind.EFFECT,
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


@given(_any_of(lambda looks: looks.wrote))
def shared_file(_: DiagnosisContext, wrote: ByRank[OverwrittenFile]) -> Explanation | None:
    """Ranks that began one file anew, each: who comes last has written it, or parts of several stand in it."""
    writers: dict[str, dict[int, OverwrittenFile]] = {}
    for rank, one in wrote:
        writers.setdefault(one.path, {})[rank] = one
    several = [(path, found) for path, found in writers.items() if len(found) > 1]
    if not several:
        return None
    path, found = several[0]
    place = found[min(found)].place
    more = "" if len(several) == 1 else f", and {counted(len(several) - 1, 'more file')}"
    claim = f"{ranks_text(list(found))} each wrote {shorten(path, 120)} from its beginning{at(place)}{more}"
    return _noted(Cause.SHARED_FILE, found, claim, place=place, evidence=EvidenceKind.PART)


def _moment(first: Parting) -> str:
    made = "DDP's constructor" if first.wrapped else "the start, before the first step"
    begun = f"the time between step {first.round} and the next forward" if first.round else _AT_FIRST
    words = {"made": made, "begun": begun, "before": f"step {first.round} or earlier"}
    return words.get(first.at, f"the end of step {first.round}")


_AT_FIRST = "the time before the first step"


def _departed(first: Parting) -> str:
    told = _TOLD[first.told]
    if first.at == "made" and not first.wrapped:
        told = f"began with {'other values' if first.told else 'values of their own'}, and reduce gradients alike"
    return f"{ranks_text(first.ranks)} {told}"


_TOLD = {
    "outside": "changed parameters outside of an optimizer step, and the others did not",
    "extra step": "took another number of optimizer steps than backward passes",
    "fewer": "came out of it unlike the others",
    "": "came out of it unequal, and which one changed cannot be told",
}


def _amount(apart: float) -> str:
    return "in being finite" if apart == float("inf") else f"by {apart:.2g} of the size"


def memory_growth(context: DiagnosisContext) -> Explanation | None:
    """Memory that grows with the steps until the end, as fast late as early."""
    kinds: Mapping[str, Callable[[Memory], int | None]] = {
        "host": lambda point: point.anonymous_bytes,
        "GPU": lambda point: point.gpu_bytes,
    }
    growing = [
        (rank, kind, growth)
        for kind, of in kinds.items()
        for rank, memory in _looked(context, lambda looks: [looks.memory])
        if (growth := _growth(memory, of)) is not None
    ]
    if not growing:
        return None
    _, kind, (slope, grown, begin, end) = max(growing, key=lambda one: one[2][1])
    ranks = [rank for rank, one, _ in growing if one == kind]
    return _noted(
        Cause.MEMORY_GROWTH,
        ranks,
        f"the {kind} memory of {ranks_text(ranks)} grows by {bytes_text(slope)} a step and does not level off:"
        f" {bytes_text(grown)} more from step {begin} to {end}",
        evidence=EvidenceKind.PART,
    )


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


def input_bound(context: DiagnosisContext) -> Explanation | None:
    """Most of the time goes by in waiting for the data loader, from the beginning to the end."""
    waits = {
        rank: wait
        for rank, fetched in _looked(context, lambda looks: [looks.fetched])
        if (wait := _wait(fetched)) is not None
    }
    if not waits:
        return None
    worst = max(waits, key=lambda rank: waits[rank].waited_s)
    most = waits[worst]
    return _noted(
        Cause.INPUT_BOUND,
        sorted(waits),
        f"rank {worst} waited for its data loader for {most.waited_s:.1f} of {most.passed_s:.1f} s of its steps up to"
        f" {most.step}{at(most.place)}",
        place=most.place,
        evidence=EvidenceKind.PART,
    )


def _wait(fetched: Sequence[Fetched]) -> Fetched | None:
    """What was waited since the first steps; None where that is little, or was not so all the time."""
    points = [one for one in fetched if one.step > _WARM_STEPS]
    if not points or points[-1].step - points[0].step < _WAITED_STEPS:
        return None
    first, last = points[0], points[-1]
    halfway = (first.passed_s + last.passed_s) / 2
    middle = min(points, key=lambda one: abs(one.passed_s - halfway))
    shares = [
        (b.waited_s - a.waited_s) / max(b.passed_s - a.passed_s, 1e-9) for a, b in pairwise((first, middle, last))
    ]
    waited_s = last.waited_s - first.waited_s
    if waited_s < _WAITED_S or min(shares) < _WAITING:
        return None
    return replace(last, waited_s=waited_s, passed_s=last.passed_s - first.passed_s)


def no_gradient(context: DiagnosisContext) -> Explanation | None:
    """What says it most closely: a trace, the looks at an optimizer's parameters, those at what a backward left."""
    asked = (ask(context) for ask in (_traced, _never_trained, _trained_by_zeros, _left_zeros, _left_none))
    return next((found for found in asked if found is not None), None)


def _lacking(context: DiagnosisContext) -> tuple[dict[int, tuple[str, ...]]] | None:
    lacking = {rank.rank: rank.traces.missing_parameters for rank in context.evidence.ranks}
    lacking = {rank: names for rank, names in lacking.items() if names}
    return (lacking,) if lacking else None


@given(_lacking)
def _traced(_: DiagnosisContext, lacking: Mapping[int, Sequence[str]]) -> Explanation:
    missing = sorted({name for names in lacking.values() for name in names})
    return explained(
        Cause.NO_GRADIENT,
        f"{counted(len(missing), 'parameter')} received no gradient: {_some(missing, len(missing))}",
        ranks=tuple(lacking),
        place=parameter_place(missing[0]),
        evidence=EvidenceKind.FACT,
        proof=("traces.log",),
        advice="Frozen on purpose, or not reached by the loss; under DDP the second kind needs find_unused_parameters"
        " or a term of zero.",
    )


@given(_any_looks(lambda looks: looks.never_count and looks.looks >= _LOOKS_WITHOUT))
def _never_trained(_: DiagnosisContext, without: ByRank[HealthSamples]) -> Explanation:
    """Parameters that an optimizer is to train and whose module ran, but that no look found with a gradient."""
    names = list(dict.fromkeys(name for _, looks in without for name in looks.never))
    most = max(looks.never_count for _, looks in without)
    used = next((looks.never_place for _, looks in without if looks.never_place), Place())
    return _noted(
        Cause.NO_GRADIENT,
        [rank for rank, _ in without],
        f"{counted(most, 'parameter')} of the optimizer never had a gradient at any look, although the module ran:"
        f" {_some(names, most)}{f'; used{at(used)}' if used.file else ''}",
        place=parameter_place(names[0], used),
        advice=_NOT_REACHED + " If that is meant, leave its parameters out of the optimizer.",
    )


@given(_any_looks(lambda looks: looks.still_count and looks.still_looks >= _LOOKS_WITHOUT))
def _trained_by_zeros(_: DiagnosisContext, still: ByRank[HealthSamples]) -> Explanation:
    """Every gradient that an optimizer was given was zero, at every look: it changes nothing."""
    ranks = [rank for rank, _ in still]
    most = max((looks for _, looks in still), key=lambda looks: looks.still_count)
    return _noted(
        Cause.NO_GRADIENT,
        ranks,
        f"the gradients of all {counted(most.still_count, 'parameter')} of the optimizer were zero at each of"
        f" {most.still_looks} looks on {ranks_text(ranks)}",
        advice="Nothing is learnt there: look for a loss that is multiplied by zero, a mask or a clamp that cuts"
        " everything, activations that are dead, or a loss too small for the type of its gradients.",
    )


def _left_by_backward(
    wanted: Callable[[Arrived], object],
) -> Callable[[DiagnosisContext], tuple[list[int], Arrived] | None]:
    """Finds the first model whose gradients are so as a backward pass leaves them, and its ranks.

    Nobody has said there what is to be trained: the probe leaves out what the program runs or writes as if it were not.
    """

    def found(context: DiagnosisContext) -> tuple[list[int], Arrived] | None:
        looked = _looked(context, lambda looks: looks.arrived)
        left = [(rank, one) for rank, one in looked if one.looks >= _LOOKS_WITHOUT and wanted(one)]
        return ([rank for rank, one in left if one.model == left[0][1].model], left[0][1]) if left else None

    return found


@given(_left_by_backward(lambda one: one.still))
def _left_zeros(_: DiagnosisContext, ranks: Sequence[int], first: Arrived) -> Explanation:
    return _noted(
        Cause.NO_GRADIENT,
        ranks,
        f"each backward pass that was looked at, {first.looks} of them, left {first.model} on {ranks_text(ranks)}"
        " with gradients that were all zero",
        advice="Nothing is learnt from the data of these ranks, even where gradients are summed over all: look for a"
        " loss that is multiplied by zero, or a mask or a clamp that cuts everything.",
    )


@given(_left_by_backward(lambda one: one.never_count))
def _left_none(context: DiagnosisContext, ranks: Sequence[int], first: Arrived) -> Explanation:
    # A part that every rank keeps out by detach alone looks as one that is detached by mistake.
    chosen = set(ranks) == {rank.rank for rank in context.evidence.ranks if rank.looks}
    return _noted(
        Cause.NO_GRADIENT,
        ranks,
        f"{counted(first.never_count, 'parameter')} of {first.model} never had a gradient at any of {first.looks} looks"
        f" on {ranks_text(ranks)}, although the module ran: {_some(first.never, first.never_count)}",
        evidence=EvidenceKind.OPEN if chosen else EvidenceKind.EFFECT,
        left_open=("they are kept out of training on purpose, by detach",) if chosen else (),
        place=parameter_place(first.never[0]) if first.never else None,
        advice=_NOT_REACHED + " If that is meant, set requires_grad_(False).",
    )


_NOT_REACHED = "What the module returns does not reach the loss: look for detach, no_grad, .item() or .data behind it."


def _some(names: Sequence[str], count: int, *, shown: int = 3, of: str = "") -> str:
    return ", ".join(names[:shown]) + (f" and {count - shown} more{of}" if count > shown else "")


@given(_any_of(lambda looks: looks.unwaited))
def unwaited_collective(_: DiagnosisContext, lines: ByRank[Unwaited]) -> Explanation:
    """A line of the program that calls a collective asynchronously, and never asked any of its handles."""
    first = lines[0][1]
    ranks = [rank for rank, one in lines if (one.op, one.place) == (first.op, first.place)]
    others = len({one.place for _, one in lines}) - 1
    more = f", and {counted(others, 'more line')} did not either" if others else ""
    claim = (
        f"{ranks_text(ranks)} started {counted(first.calls, f'asynchronous {first.op}')}{at(first.place)}, and asked"
        f" none of them whether it is done{more}"
    )
    return _noted(Cause.UNWAITED_COLLECTIVE, ranks, claim, place=first.place)


@given(_any_of(lambda looks: looks.given_up))
def batches_given_up(context: DiagnosisContext, lost: ByRank[GivenUp]) -> Explanation | None:
    """An exception that ended training passes, was caught, and cost their batches; alike on all ranks it stops none.

    Of a rank that did not end by itself nobody knows that it was caught: another one's end may just have reached it.
    """
    lost = [(rank, one) for rank, one in lost if _went_on(context, rank)]
    if not lost:
        return None
    first = min((one for _, one in lost), key=lambda one: one.step)
    alike = [(rank, one) for rank, one in lost if (one.type, one.place) == (first.type, first.place)]
    ranks, most = [rank for rank, _ in alike], max(one.batches for _, one in alike)
    others = len({(one.type, one.place) for _, one in lost}) - 1
    more = f", as did {counted(others, 'other exception')}" if others else ""
    claim = (
        f"{first.type} was raised{at(first.place)} in step {first.step} on {ranks_text(ranks)} and caught; it cost"
        f" {counted(most, 'batch', 'batches')}, with no step for {'it' if most == 1 else 'them'}{more}"
    )
    return _noted(Cause.SWALLOWED_EXCEPTION, ranks, claim, place=first.place)


def _went_on(context: DiagnosisContext, rank: int) -> bool:
    known = context.rank(rank)
    return known is not None and known.exit is not None and known.exit.status == 0


def _unset(looks: HealthSamples) -> list[Arrived]:
    return [one for one in looks.arrived if one.unset]


@given(_any_of(_unset))
def uninitialised_parameters(_: DiagnosisContext, unset: ByRank[Arrived]) -> Explanation:
    """Parameters that had a gradient, and held before any step what no program begins with."""
    first = unset[0][1]
    ranks = [rank for rank, _ in unset]
    more = f" and {counted(len(first.unset) - 1, 'more parameter')}" if len(first.unset) > 1 else ""
    claim = (
        f"{first.unset[0]}{more} of {first.model} held {first.unset_value} on {ranks_text(ranks)} before the first"
        " step: memory that was given out and never written, it seems"
    )
    return _noted(Cause.UNINITIALISED_PARAMETERS, ranks, claim, place=parameter_place(first.unset[0]))


def dirty_exit(context: DiagnosisContext) -> Explanation | None:
    """An end that failed or left something behind, although every rank left with 0."""
    if context.judgement.status is not Status.PASS:
        return None
    said = [(rank.rank, words) for rank in context.evidence.ranks for words in rank.last_words]
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
        evidence=EvidenceKind.ENDED,
        proof=(f"rank{rank}/stderr.log",),
    )


_KINDS = ("atexit", "left", "process group")


def _left_behind(words: LastMessages) -> str:
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
    since = list(takewhile(lambda key: key in differing, reversed(common)))
    first = since[-1]
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
    looks: Mapping[int, Mapping[_Key, ReplicaSample]],
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
    looks: Mapping[int, Mapping[_Key, ReplicaSample]], common: Sequence[_Key], first: _Key
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
