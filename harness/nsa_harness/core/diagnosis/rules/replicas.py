"""The rule about replicas of a model that differ between ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, layer_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.diagnosis.sample_findings import MIN_GRADIENT_SAMPLES, explain_samples, samples_by_rank
from nsa_harness.core.evidence.health_samples import HealthSamples, ParameterBlock, Replica, ReplicaSample
from nsa_harness.core.report import Place


def _divergences(context: DiagnosisContext) -> tuple[list[ReplicaDivergence]] | None:
    """Return the models whose replicas differ between ranks although they should be equal, or None."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Replica]] = {}
    for rank, replica in samples_by_rank(context, lambda samples: samples.replicas):
        groups.setdefault((replica.number, replica.ranks), {})[rank] = replica
    complete = (replicas for (_, members), replicas in groups.items() if set(members) == set(replicas))
    health = dict(samples_by_rank(context, lambda samples: (samples,)))
    divergences = [
        match
        for replicas in complete
        if (match := first_divergence(replicas) or _uneven_steps(replicas, health)) is not None
    ]
    return (divergences,) if divergences else None


def _uneven_steps(replicas: Mapping[int, Replica], health: Mapping[int, HealthSamples]) -> ReplicaDivergence | None:
    """Return the difference if the ranks made equally many backward passes but unequally many optimizer steps.

    Such ranks accumulate gradients over different numbers of micro-batches. Only ranks that exited normally are
    compared, because a rank that ends early makes fewer steps. Return None if the steps agree.
    """
    ranks = {rank: health[rank] for rank in sorted(replicas)}
    is_alike = len({samples.losses for samples in ranks.values()}) == 1
    exited = all(samples.open_group is not None for samples in ranks.values())
    counts = Counter(samples.steps for samples in ranks.values())
    if len(counts) < 2 or not (is_alike and exited) or any(not one.in_ddp or one.hook for one in replicas.values()):
        return None
    usual, most = counts.most_common(1)[0]
    minority = tuple(rank for rank, samples in ranks.items() if samples.steps != usual)
    return ReplicaDivergence(
        ranks=minority if 2 * most > len(ranks) else tuple(ranks),
        identified_by="steps",
        at="stepped",
        round=0,
        names=(),
        difference=math.inf,
        in_ddp=True,
        steps=tuple((rank, samples.steps) for rank, samples in ranks.items()),
    )


@rule_if(_divergences)
def replica_divergence(_: DiagnosisContext, divergences: Sequence[ReplicaDivergence]) -> Explanation:
    """Report model replicas that differ between ranks although they should be equal."""
    first = min(divergences, key=lambda divergence: divergence.round)
    name = first.names[0] if first.names else None
    return explain_samples(
        Cause.REPLICA_DIVERGENCE,
        first.ranks,
        {
            "in_ddp": first.in_ddp,
            "since": first.at,
            "last_step": first.round,
            "identified_by": first.identified_by,
            "parts": first.names,
            "difference": first.difference if math.isfinite(first.difference) else None,
            **(
                {"optimizer_steps": ranks_by_facts((rank, {"steps": count}) for rank, count in first.steps)}
                if first.steps
                else {}
            ),
        },
        place=Place(parameter=name, layer=layer_of(name)) if name else None,
        evidence=EvidenceKind.RECORD if first.identified_by and first.in_ddp else EvidenceKind.EFFECT,
    )


# Smallest relative difference of replicas that counts. A different order of summation causes smaller differences.
MATERIAL = 1e-4


@dataclass(frozen=True, kw_only=True)
class ReplicaDivergence:
    """A difference between a model's replicas, with the ranks that are at fault."""

    ranks: tuple[int, ...]  # the ranks at fault; all ranks if that is unknown
    identified_by: str  # how the ranks at fault were found: see `_ranks_at_fault`
    at: str  # first sampled moment at which the replicas differ; "before": an earlier sample is lost
    round: int  # number of training steps at this moment
    names: tuple[str, ...]  # names of the parameters that differ in the last sample
    difference: float  # largest difference in the last sample, relative to the size of the parameters
    in_ddp: bool  # the model is in DDP on every rank
    steps: tuple[tuple[int, int], ...] = ()  # optimizer steps by rank, if their numbers show the difference


_Moment = tuple[str, int]  # the fields `at` and `round` of a ReplicaSample


def _other_order(replicas: Mapping[int, Replica]) -> ReplicaDivergence | None:
    """Return the difference if parameters have different orders, so that DDP averages different gradients, or None."""
    orders = {replica.order for replica in replicas.values()}
    name_sets = {replica.name_set for replica in replicas.values()}
    if len(orders) < 2 or not all(orders) or len(name_sets) > 1:
        return None
    if not all(replica.in_ddp for replica in replicas.values()):
        return None
    columns = list(zip(*(replica.order for replica in replicas.values()), strict=False))
    block = next((index for index, column in enumerate(columns) if len(set(column)) > 1), 0)
    blocks = [replicas[rank].names[block] for rank in sorted(replicas) if block < len(replicas[rank].names)]
    return ReplicaDivergence(
        ranks=tuple(sorted(replicas)),
        identified_by="order",
        at="made",
        round=0,
        names=tuple(dict.fromkeys(first for first, _ in blocks)),
        difference=math.inf,
        in_ddp=True,
    )


def first_divergence(replicas: Mapping[int, Replica]) -> ReplicaDivergence | None:
    """Return the difference between a model's replicas, by rank, or None if they are equal or not meant to be."""
    if len(replicas) > 1 and (other_order := _other_order(replicas)) is not None:
        return other_order
    if len(replicas) < 2 or any(
        replica.hook or replica.names != _first_replica(replicas).names for replica in replicas.values()
    ):
        return None
    samples_by_rank = {
        rank: {(sample.at, sample.round): sample for sample in replica.samples} for rank, replica in replicas.items()
    }
    common_moments = [
        moment
        for moment in _sampled_moments(replicas)
        if all(moment in by_moment for by_moment in samples_by_rank.values())
    ]
    if not common_moments or len({replica.samples[-1].round for replica in replicas.values()}) > 1:
        return None
    differing_moments = [
        moment
        for moment in common_moments
        if len({by_moment[moment].checksum for by_moment in samples_by_rank.values()}) > 1
    ]
    if not differing_moments or differing_moments[-1] != common_moments[-1]:
        return None
    first_moment = list(takewhile(lambda moment: moment in differing_moments, reversed(common_moments)))[-1]
    names, difference = _last_difference([replicas[rank] for rank in sorted(replicas)])
    is_in_ddp = all(replica.in_ddp for replica in replicas.values())
    if difference < MATERIAL or not (
        is_in_ddp or _should_be_equal(replicas, samples_by_rank, common_moments, differing_moments)
    ):
        return None
    ranks, identified_by = _ranks_at_fault(samples_by_rank, common_moments, first_moment)
    return ReplicaDivergence(
        ranks=ranks,
        identified_by=identified_by,
        at="before" if first_moment == common_moments[0] and first_moment[0] != "made" else first_moment[0],
        round=first_moment[1],
        names=names,
        difference=difference,
        in_ddp=is_in_ddp,
    )


def _should_be_equal(
    replicas: Mapping[int, Replica],
    samples_by_rank: Mapping[int, Mapping[_Moment, ReplicaSample]],
    common_moments: Sequence[_Moment],
    differing_moments: Sequence[_Moment],
) -> bool:
    """Return whether replicas of a model without DDP are meant to be equal.

    They are if they were equal up to some step, and never again. While they were equal, either all parameters had been
    broadcast, or a step changed all replicas in the same way. If they were equal only at the start, the reason may be a
    common seed. If they become equal again later, the program averages them from time to time. If they differ only at
    the end, an evaluation changed them. Replicas that were never equal are still meant to be equal if the program sums
    every gradient over all ranks.
    """
    equal_moments = common_moments.index(differing_moments[0])
    if len(differing_moments) < len(common_moments) - equal_moments or differing_moments[0][0] == "over":
        return False
    if not equal_moments:
        return len(common_moments) >= MIN_GRADIENT_SAMPLES and all(
            replica.reduces_gradients for replica in replicas.values()
        )
    by_moment = next(iter(samples_by_rank.values()))
    checksums = {by_moment[moment].checksum for moment in common_moments[:equal_moments]}
    return len(checksums) > 1 or (bool(checksums) and all(replica.was_broadcast for replica in replicas.values()))


def _first_replica(replicas: Mapping[int, Replica]) -> Replica:
    return next(iter(replicas.values()))


def _sampled_moments(replicas: Mapping[int, Replica]) -> list[_Moment]:
    """Return the moments at which any replica was sampled, in order."""
    moments = [(sample.at, sample.round) for sample in _first_replica(replicas).samples]
    return list(dict.fromkeys(reversed(moments)))[::-1]


def _ranks_at_fault(
    samples_by_rank: Mapping[int, Mapping[_Moment, ReplicaSample]], common_moments: Sequence[_Moment], moment: _Moment
) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose replicas are wrong, and the method by which they were found.

    "outside": only their parameters changed outside a step. "extra step": only they made additional optimizer steps.
    "fewer": they are the minority. "": all ranks are returned, because none of these is the case.
    """
    all_ranks = tuple(sorted(samples_by_rank))
    position = common_moments.index(moment)
    previous = common_moments[position - 1] if position else None
    if previous is not None and moment[0] == "begun" and previous[1] == moment[1]:
        changed_ranks = [
            rank
            for rank in all_ranks
            if samples_by_rank[rank][previous].checksum != samples_by_rank[rank][moment].checksum
        ]
        if 0 < len(changed_ranks) < len(all_ranks):
            return tuple(changed_ranks), "outside"
    if previous is not None and moment[0] == "stepped":
        steps_taken = {
            rank: samples_by_rank[rank][moment].steps - samples_by_rank[rank][previous].steps for rank in all_ranks
        }
        steps_per_round = {
            rank: samples_by_rank[rank][previous].steps / previous[1] if previous[1] else 1.0 for rank in all_ranks
        }
        extra_ranks = [
            rank for rank in all_ranks if steps_taken[rank] != (moment[1] - previous[1]) * steps_per_round[rank]
        ]
        if 0 < len(extra_ranks) < len(all_ranks):
            return tuple(extra_ranks), "extra step"
    checksums = {rank: samples_by_rank[rank][moment].checksum for rank in all_ranks}
    (common_checksum, count), *others = Counter(checksums.values()).most_common()
    if 2 * count > len(all_ranks) and others:
        return tuple(rank for rank in all_ranks if checksums[rank] != common_checksum), "fewer"
    return all_ranks, ""


def _last_difference(replicas: Sequence[Replica]) -> tuple[tuple[str, ...], float]:
    """Return the parameters that differ between replicas in the last sample, and their maximal relative difference."""
    names: list[str] = []
    largest = 0.0
    for number, (first_name, last_name) in enumerate(replicas[0].names):
        blocks = [replica.blocks[number] for replica in replicas if number < len(replica.blocks)]
        if len({block.checksum for block in blocks}) > 1:
            names.append(first_name if first_name == last_name else f"{first_name} .. {last_name}")
            largest = max(largest, _relative_difference(blocks))
    return tuple(names), largest


def _relative_difference(blocks: Sequence[ParameterBlock]) -> float:
    """Return the largest relative difference between blocks: infinity if some are not finite, 0 if none is."""
    finite = [block for block in blocks if math.isfinite(block.size) and math.isfinite(block.total)]
    if len(finite) < len(blocks):
        return math.inf if finite else 0.0
    size = max(max(block.size for block in blocks), 1e-30)
    sizes, totals = [block.size for block in blocks], [block.total for block in blocks]
    return max(max(sizes) - min(sizes), max(totals) - min(totals)) / size
