"""The rule about replicas of a model that differ between ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, layer_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, rule_if
from nsa_harness.core.diagnosis.sample_findings import MIN_GRADIENT_SAMPLES, explain_samples, samples_by_rank
from nsa_harness.core.evidence.health_samples import HealthSamples, ParameterBlock, Replica, ReplicaSample
from nsa_harness.core.report import Place


def _divergences(context: DiagnosisContext) -> tuple[list[ReplicaDivergence]] | None:
    """Return the models whose replicas differ between ranks although they should be equal, or None."""
    health = dict(samples_by_rank(context, lambda samples: (samples,)))
    calls = [call for rank in context.evidence.ranks if rank.status_file for call in rank.status_file.calls]
    # Experts that each rank trains for itself receive their inputs through all_to_all.
    has_experts = any(call.op.startswith("all_to_all") for call in calls)
    # The ranks of a model that is divided between them exchange data in its forward.
    is_divided = has_experts or any(frame.function == _FORWARD for call in calls for frame in call.chain)
    models = list(complete_replicas(samples_by_rank(context, lambda samples: samples.replicas)))
    divergences = [
        match
        for replicas in models
        if _first_replica(replicas).kind != "summed"
        and not (has_experts and _first_replica(replicas).kind in _UNREDUCED)
        and not (is_divided and _first_replica(replicas).kind == LEFT_OUT)
        and (
            match := first_divergence(replicas, is_divided=is_divided)
            or _uneven_steps(replicas, health)
            or _unequal_copy(replicas, models)
            or _never_equal_again(replicas)
            or _local_buffers(replicas, models)
        )
        is not None
        and (match.identified_by != LEFT_OUT or _is_rest_equal(replicas, models))
    ]
    return (divergences,) if divergences else None


def complete_replicas(replicas: Iterable[tuple[int, Replica]]) -> Iterator[Mapping[int, Replica]]:
    """Yield the replicas of each model by rank, if every rank of its group has samples of it.

    Models in DDP are numbered in their order. A rank may have another model before those without DDP, such as one that
    it trains alone to initialize them. So their names and their size identify them, and their order if these are equal.
    Buffers, copies and parts of models have no number that is the same on all ranks, so their names identify them.
    """
    groups: dict[tuple[object, ...], dict[int, Replica]] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for rank, replica in replicas:
        key: tuple[object, ...] = (replica.number,)
        if replica.kind:
            key = replica.kind, replica.type, replica.names
        elif not replica.in_ddp:
            counts[rank, replica.names, replica.numel] += 1
            key = replica.names, replica.numel, counts[rank, replica.names, replica.numel]
        groups.setdefault((replica.ranks, *key), {})[rank] = replica
    yield from (by_rank for by_rank in groups.values() if {*_first_replica(by_rank).ranks} == {*by_rank})


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
    # Buffers and copies that differ are often the effect of parameters that differ, so parameters come first.
    first = min(divergences, key=lambda divergence: (divergence.round, divergence.type))
    name = next(iter((*first.first_names, *first.names)), None)
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
            **({"first_parts": first.first_names} if set() < set(first.first_names) < set(first.names) else {}),
            **({"type": first.type} if first.type else {}),
            **({"exchanges": first.exchanges} if first.exchanges else {}),
            **(
                {"optimizer_steps": ranks_by_facts((rank, {"steps": count}) for rank, count in first.steps)}
                if first.steps
                else {}
            ),
            **(
                {"learning_rates": ranks_by_facts((rank, {"rate": rate}) for rank, rate in first.learning_rates)}
                if first.learning_rates
                else {}
            ),
        },
        place=replace(first.place or Place(), parameter=name, layer=layer_of(name)) if name else first.place,
        evidence=_evidence_of(first),
        left_open=(OpenQuestion(code="local_on_purpose"),) if first.identified_by == LOCAL_BUFFERS else (),
    )


def _evidence_of(divergence: ReplicaDivergence) -> EvidenceKind:
    if divergence.identified_by == LOCAL_BUFFERS:
        return EvidenceKind.OPEN
    return EvidenceKind.RECORD if divergence.identified_by and divergence.in_ddp else EvidenceKind.EFFECT


# Smallest relative difference of replicas that counts. A different order of summation causes smaller differences.
MATERIAL = 1e-4


@dataclass(frozen=True, kw_only=True)
class ReplicaDivergence:
    """A difference between a model's replicas, with the ranks that are at fault."""

    ranks: tuple[int, ...]  # the ranks at fault; all ranks if that is unknown
    identified_by: str  # how the ranks at fault were found: see `_ranks_at_fault`; or the kind of the replica
    at: str  # first sampled moment at which the replicas differ; "before": an earlier sample is lost
    round: int  # number of training steps at this moment
    names: tuple[str, ...]  # names of the parameters that differ in the last sample
    difference: float  # largest difference in the last sample, relative to the size of the parameters
    in_ddp: bool  # the model is in DDP on every rank
    steps: tuple[tuple[int, int], ...] = ()  # optimizer steps by rank, if their numbers show the difference
    first_names: tuple[str, ...] = ()  # names of the parameters that differ at this moment; empty: not recorded
    learning_rates: tuple[tuple[int, float], ...] = ()  # by rank, if these differ at this moment
    type: str = ""  # as in Replica
    place: Place | None = None  # the line that called the model past DDP, or that wrapped it too early
    exchanges: int = 0  # number of exchanges after which the replicas differed, if these show the difference


LEFT_OUT = "left out"  # kind of trained parameters whose gradients a program does not sum, although it sums others
_UNREDUCED = ("added", "beside", LEFT_OUT)  # kinds of trained parameters whose gradients nothing averages
NEVER_EQUAL = "never equal again"
LOCAL_BUFFERS = "local buffers"
_FORWARD = "forward"  # name of the method of a module that computes its result
_MIN_EXCHANGES = 3  # exchanges of all parameters after which replicas differ
_LASTING = 3  # samples in which buffers, or copies of a model, must differ up to the end of the run
_Moment = tuple[str, int]  # the fields `at` and `round` of a ReplicaSample
_Samples = Mapping[int, Mapping[_Moment, ReplicaSample]]  # by rank


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


def first_divergence(replicas: Mapping[int, Replica], *, is_divided: bool = False) -> ReplicaDivergence | None:
    """Return the difference between a model's replicas, by rank, or None if they are equal or not meant to be.

    `is_divided`: parts of the model may be divided between the ranks, which then exchange data in its forward.
    """
    if len(replicas) > 1 and (other_order := _other_order(replicas)) is not None:
        return other_order
    if len(replicas) < 2 or any(
        replica.hook or replica.names != _first_replica(replicas).names for replica in replicas.values()
    ):
        return None
    samples_by_rank: _Samples = {
        rank: {(sample.at, sample.round): sample for sample in replica.samples} for rank, replica in replicas.items()
    }
    common_moments = [
        moment
        for moment in _sampled_moments(replicas)
        if all(moment in by_moment for by_moment in samples_by_rank.values())
    ]
    if not common_moments or len({replica.samples[-1].round for replica in replicas.values()}) > 1:
        return None
    first = _first_replica(replicas)
    if first.kind and first.kind not in _UNREDUCED:
        return _companion_divergence(replicas, samples_by_rank, common_moments)
    differing_moments = [
        moment
        for moment in common_moments
        if len({by_moment[moment].checksum for by_moment in samples_by_rank.values()}) > 1
    ]
    if not differing_moments or differing_moments[-1] != common_moments[-1]:
        return None
    first_moment = list(takewhile(lambda moment: moment in differing_moments, reversed(common_moments)))[-1]
    names, difference = _last_difference(replicas)
    is_in_ddp = all(replica.in_ddp for replica in replicas.values())
    if difference < MATERIAL or not (
        is_in_ddp
        or _should_be_equal(replicas, samples_by_rank, common_moments, differing_moments, is_divided=is_divided)
    ):
        return None
    ranks, identified_by = _ranks_at_fault(samples_by_rank, common_moments, first_moment)
    place = _bypass_place(samples_by_rank, common_moments, first_moment)
    if first.kind or place:
        ranks, identified_by = tuple(sorted(replicas)), first.kind or "bypassed"
    return ReplicaDivergence(
        ranks=ranks,
        identified_by=identified_by,
        at="before" if first_moment == common_moments[0] and first_moment[0] != "made" else first_moment[0],
        round=first_moment[1],
        names=names,
        difference=difference,
        # Parameters that were added to a model in DDP and were equal at first are as meant to be equal as the others.
        in_ddp=is_in_ddp or (first.kind == "added" and differing_moments[0] != common_moments[0]),
        type=first.type,
        place=first.wrap_place or place,
        first_names=tuple(
            name for block, name in _block_names(replicas) if block in _differing(samples_by_rank, first_moment)
        ),
        learning_rates=tuple((rank, rates[0]) for rank, rates in _differing_rates(samples_by_rank, first_moment)),
    )


def _bypass_place(samples_by_rank: _Samples, common_moments: Sequence[_Moment], first_moment: _Moment) -> Place | None:
    """Return the line that called the model past DDP in the step that made the replicas differ, or None.

    If an earlier step did so and left the replicas equal, the program averages the gradients itself.
    """
    later = common_moments[common_moments.index(first_moment) :]
    # If the samples of this step are lost, the next optimizer step that was sampled counts.
    moment = next((moment for moment in later if moment[0] == "stepped"), first_moment)
    if moment != first_moment and first_moment != common_moments[0]:
        return None
    places = [by_moment[moment].bypass_place for by_moment in samples_by_rank.values()]
    earlier = common_moments[: common_moments.index(first_moment)]
    was_harmless = any(by_moment[each].bypass_place for by_moment in samples_by_rank.values() for each in earlier)
    return places[0] if all(places) and not was_harmless else None


def _companion_divergence(
    replicas: Mapping[int, Replica], samples_by_rank: _Samples, common_moments: Sequence[_Moment]
) -> ReplicaDivergence | None:
    """Return the first difference between buffers, or between copies of a model, that were meant to be equal.

    A block is only meant to be equal if several changes of it were the same on all ranks. From the difference on, it
    must differ in all samples up to the last one.
    """
    differing = {moment: _differing(samples_by_rank, moment) for moment in common_moments}
    by_moment = next(iter(samples_by_rank.values()))
    last_blocks = dict(_last_differences(replicas))
    found: dict[_Moment, list[str]] = {}
    for block, name in _block_names(replicas):
        moments = [moment for moment in common_moments if block in differing[moment]]
        equal = common_moments[: len(common_moments) - len(moments)]
        changes = {by_moment[moment].block_checksums[4 * block : 4 * block + 4] for moment in equal}
        is_lasting = len(moments) >= _LASTING and moments == common_moments[len(equal) :]
        if is_lasting and len(changes) >= MIN_GRADIENT_SAMPLES and last_blocks.get(block, 0.0) >= MATERIAL:
            found.setdefault(moments[0], []).append(name)
    if not found:
        return None
    moment = min(found, key=common_moments.index)
    first = _first_replica(replicas)
    return ReplicaDivergence(
        ranks=tuple(sorted(replicas)),
        identified_by=first.kind,
        at=moment[0],
        round=moment[1],
        names=tuple(found[moment]),
        difference=max(last_blocks[block] for block, name in _block_names(replicas) if name in found[moment]),
        in_ddp=False,
        type=first.type,
    )


def _unequal_copy(copies: Mapping[int, Replica], models: Iterable[Mapping[int, Replica]]) -> ReplicaDivergence | None:
    """Return the difference between copies of a model that were never equal, although the model in DDP always was.

    The copies must change on every rank, as a moving average of the model does. A copy that does not change may differ
    on purpose.
    """
    first, samples = _first_replica(copies), [replica.samples for replica in copies.values()]
    originals = [model for model in models if not _first_replica(model).kind and {*model} == {*copies}]
    if first.kind != "copy" or len({replica.names for replica in copies.values()}) > 1:
        return None
    if not any(_is_always_equal(model) and _first_replica(model).names == first.names for model in originals):
        return None
    moments = {tuple((sample.at, sample.round) for sample in one) for one in samples}
    differ = all(len({sample.checksum for sample in at}) > 1 for at in zip(*samples, strict=False))
    changes = min(len({sample.checksum for sample in one}) for one in samples)
    names, difference = _last_difference(copies)
    if len(moments) > 1 or not differ or changes < MIN_GRADIENT_SAMPLES or difference < MATERIAL:
        return None
    return ReplicaDivergence(
        ranks=tuple(sorted(copies)),
        identified_by="unequal copy",
        at=samples[0][0].at,
        round=samples[0][0].round,
        names=names,
        difference=difference,
        in_ddp=False,
        type=first.type,
    )


def _is_rest_equal(replicas: Mapping[int, Replica], models: Iterable[Mapping[int, Replica]]) -> bool:
    """Return whether the parameters of the same model whose gradients the program sums were equal in every sample."""
    type_of_model = _first_replica(replicas).type
    for others in models:
        first = _first_replica(others)
        if first.kind == "summed" and first.type == type_of_model and {*others} == {*replicas}:
            samples = {tuple((each.at, each.round, each.checksum) for each in one.samples) for one in others.values()}
            return len(samples) == 1
    return False


def _never_equal_again(replicas: Mapping[int, Replica]) -> ReplicaDivergence | None:
    """Return the difference between replicas that were broadcast, exchanged in full several times, and never equal.

    Ranks that make different numbers of steps between two exchanges have no steps in common. The first forward pass
    after an exchange is a moment that they have in common: there they have begun the same number of collectives.
    """
    first, every = _first_replica(replicas), list(replicas.values())
    is_meant = all(one.was_broadcast and not (one.kind or one.in_ddp or one.hook) and one.numel for one in every)
    is_same = len({(one.names, one.first_checksum) for one in every}) == 1
    if len(every) < 2 or not (is_meant and is_same):
        return None
    by_rank = [
        {(each.number, each.calls): each for each in one.exchanges if each.elements >= one.numel} for one in every
    ]
    common = [moment for moment in by_rank[0] if all(moment in exchanges for exchanges in by_rank)]
    if len(common) < _MIN_EXCHANGES:
        return None
    if any(len({exchanges[moment].checksum for exchanges in by_rank}) == 1 for moment in common):
        return None
    names, difference = _difference([exchanges[common[-1]].blocks for exchanges in by_rank], first)
    if difference < MATERIAL:
        return None
    return ReplicaDivergence(
        ranks=tuple(sorted(replicas)),
        identified_by=NEVER_EQUAL,
        at="made",
        round=first.samples[0].round,
        names=names,
        difference=difference,
        in_ddp=False,
        exchanges=len(common),
    )


def _local_buffers(
    replicas: Mapping[int, Replica], models: Iterable[Mapping[int, Replica]]
) -> ReplicaDivergence | None:
    """Return the difference between buffers that each rank changes by its own data, while the parameters stay equal.

    The program may do so on purpose, as with statistics of each rank's own batches.
    """
    first = _first_replica(replicas)
    samples = {rank: {(each.at, each.round): each for each in one.samples} for rank, one in replicas.items()}
    moments = [moment for moment in _sampled_moments(replicas) if all(moment in one for one in samples.values())]
    is_comparable = first.kind == "buffers" and len({one.names for one in replicas.values()}) == 1
    if len(replicas) < 2 or not is_comparable or len(moments) < _LASTING:
        return None
    originals = [model for model in models if not _first_replica(model).kind and {*model} == {*replicas}]
    if not originals or not all(_is_always_equal(model) for model in originals):
        return None
    last = dict(_last_differences(replicas))
    names = []
    for block, name in _block_names(replicas):
        differing = [moment for moment in moments if block in _differing(samples, moment)]
        is_lasting = differing == moments[-len(differing) :] and len(differing) >= max(_LASTING, len(moments) - 2)
        changes = [
            len({one[moment].block_checksums[4 * block : 4 * block + 4] for moment in moments})
            for one in samples.values()
        ]
        if is_lasting and min(changes) >= MIN_GRADIENT_SAMPLES and last.get(block, 0.0) >= MATERIAL:
            names.append(name)
    if not names:
        return None
    return ReplicaDivergence(
        ranks=tuple(sorted(replicas)),
        identified_by=LOCAL_BUFFERS,
        at="before",
        round=moments[0][1],
        names=tuple(names),
        difference=max(last[block] for block, name in _block_names(replicas) if name in names),
        in_ddp=False,
        type=first.type,
    )


def _is_always_equal(replicas: Mapping[int, Replica]) -> bool:
    """Return whether a model in DDP had the same values on all ranks in every sample."""
    samples = {tuple((one.at, one.round, one.checksum) for one in replica.samples) for replica in replicas.values()}
    return len(samples) == 1 and len(replicas) > 1 and all(replica.in_ddp for replica in replicas.values())


def _differing(samples_by_rank: _Samples, moment: _Moment) -> set[int]:
    """Return the numbers of the blocks that differ between ranks at a moment; empty if blocks were not recorded."""
    texts = [by_moment[moment].block_checksums for by_moment in samples_by_rank.values()]
    return {
        block for block in range(len(texts[0]) // 4) if len({text[4 * block : 4 * block + 4] for text in texts}) > 1
    }


def _differing_rates(samples_by_rank: _Samples, moment: _Moment) -> list[tuple[int, tuple[float, ...]]]:
    """Return the learning rates of each rank at a moment, or [] if they are equal or were not recorded."""
    rates = [(rank, by_moment[moment].learning_rates) for rank, by_moment in sorted(samples_by_rank.items())]
    return rates if len(set(dict(rates).values())) > 1 and all(dict(rates).values()) else []


def _should_be_equal(
    replicas: Mapping[int, Replica],
    samples_by_rank: _Samples,
    common_moments: Sequence[_Moment],
    differing_moments: Sequence[_Moment],
    *,
    is_divided: bool,
) -> bool:
    """Return whether replicas of a model without DDP are meant to be equal.

    They are if they were equal up to some step, and never again. While they were equal, either all parameters had been
    broadcast, or a step changed all replicas in the same way. If they were equal only at the start, the reason may be a
    common seed, unless the ranks exchange in every step at least as many elements as the model has. If they become
    equal again later, the program averages them from time to time. If they differ only at the end, an evaluation
    changed them. Replicas that were never equal are still meant to be equal if the program sums
    every gradient over all ranks. The same applies to trained parameters that DDP does not average.
    """
    equal_moments = common_moments.index(differing_moments[0])
    if len(differing_moments) < len(common_moments) - equal_moments or differing_moments[0][0] == "over":
        return False
    if _first_replica(replicas).kind:
        return len(differing_moments) >= MIN_GRADIENT_SAMPLES
    is_exchanged = not is_divided and _exchanges_every_step(replicas, samples_by_rank, common_moments)
    if not equal_moments:
        # The oldest samples of a long run are not stored.
        was_equal = len({replica.first_checksum or rank for rank, replica in replicas.items()}) == 1
        is_reduced = all(replica.reduces_gradients for replica in replicas.values())
        return len(common_moments) >= MIN_GRADIENT_SAMPLES and (is_reduced or (was_equal and is_exchanged))
    by_moment = next(iter(samples_by_rank.values()))
    checksums = {by_moment[moment].checksum for moment in common_moments[:equal_moments]}
    was_broadcast = all(replica.was_broadcast for replica in replicas.values())
    return len(checksums) > 1 or (bool(checksums) and (was_broadcast or is_exchanged))


def _exchanges_every_step(
    replicas: Mapping[int, Replica], samples_by_rank: _Samples, common_moments: Sequence[_Moment]
) -> bool:
    """Return whether every rank exchanged as many elements as the model has, at least, between its sampled steps."""
    steps = [moment for moment in common_moments if moment[0] == "stepped" and moment[1] > 1]
    return len(steps) >= MIN_GRADIENT_SAMPLES and all(
        0 < replicas[rank].numel <= by_moment[step].elements
        for rank, by_moment in samples_by_rank.items()
        for step in steps
    )


def _first_replica(replicas: Mapping[int, Replica]) -> Replica:
    return next(iter(replicas.values()))


def _sampled_moments(replicas: Mapping[int, Replica]) -> list[_Moment]:
    """Return the moments at which any replica was sampled, in order."""
    moments = [(sample.at, sample.round) for sample in _first_replica(replicas).samples]
    return list(dict.fromkeys(reversed(moments)))[::-1]


def _ranks_at_fault(
    samples_by_rank: _Samples, common_moments: Sequence[_Moment], moment: _Moment
) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose replicas are wrong, and the method by which they were found.

    "outside": only their parameters changed outside a step. "extra step": only they made additional optimizer steps.
    "learning rate", "optimizer state": the learning rates, or the states of the optimizers before this step, differ.
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
        if rates := dict(_differing_rates(samples_by_rank, moment)):
            return _minority(rates) or all_ranks, "learning rate"
        states = {rank: samples_by_rank[rank][previous].optimizer_state for rank in all_ranks}
        if all(states.values()) and len(set(states.values())) > 1:
            return _minority(states) or all_ranks, "optimizer state"
    checksums = {rank: samples_by_rank[rank][moment].checksum for rank in all_ranks}
    minority = _minority(checksums)
    return minority or all_ranks, "fewer" if minority else ""


def _minority(values: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of most ranks, or () if there is no majority."""
    (common_value, count), *_ = Counter(values.values()).most_common()
    return tuple(rank for rank in values if values[rank] != common_value) if 2 * count > len(values) else ()


def _last_difference(replicas: Mapping[int, Replica]) -> tuple[tuple[str, ...], float]:
    """Return the parameters that differ between replicas in the last sample, and their maximal relative difference."""
    return _difference([replica.blocks for replica in replicas.values()], _first_replica(replicas))


def _difference(blocks: Sequence[Sequence[ParameterBlock]], replica: Replica) -> tuple[tuple[str, ...], float]:
    """Return the parameters that differ between the blocks of each rank, and their maximal relative difference."""
    differences, names = dict(_differences(blocks)), dict(_block_names({0: replica}))
    return tuple(names[block] for block in differences if block in names), max(differences.values(), default=0.0)


def _block_names(replicas: Mapping[int, Replica]) -> Iterator[tuple[int, str]]:
    for block, (first, last) in enumerate(_first_replica(replicas).names):
        yield block, first if first == last else f"{first} .. {last}"


def _last_differences(replicas: Mapping[int, Replica]) -> Iterator[tuple[int, float]]:
    """Yield the number and the relative difference of each block that differs in the last sample."""
    return _differences([replica.blocks for replica in replicas.values()])


def _differences(blocks: Sequence[Sequence[ParameterBlock]]) -> Iterator[tuple[int, float]]:
    for block, column in enumerate(zip(*blocks, strict=False)):
        if len({each.checksum for each in column}) > 1:
            yield block, _relative_difference(column)


def _relative_difference(blocks: Sequence[ParameterBlock]) -> float:
    """Return the largest relative difference between blocks: infinity if some are not finite, 0 if none is."""
    finite = [block for block in blocks if math.isfinite(block.size) and math.isfinite(block.total)]
    if len(finite) < len(blocks):
        return math.inf if finite else 0.0
    size = max(max(block.size for block in blocks), 1e-30)
    sizes, totals = [block.size for block in blocks], [block.total for block in blocks]
    return max(max(sizes) - min(sizes), max(totals) - min(totals)) / size
