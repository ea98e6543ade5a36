"""Rules about errors in autograd, DDP and activation checkpointing, and about missing gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, failed_ranks, parameter_place, place_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, Rule, rule_if
from nsa_harness.core.evidence.evidence import Hint, RankEvidence, StatusFile
from nsa_harness.core.evidence.stacks import in_function, user_frame
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.verdict import Failure, FailureKind

_COUNT_DIFFERS, _SHAPE_DIFFERS = Cause.MODEL_MISMATCH.row.signatures
_NAMING_PARAMETERS = ("without gradient", "ready twice", "newly used")  # kinds of hints that name a parameter
_FIRST_EVENTS = 3  # a step starts with three training events: batch requested, batch received, forward


def rule_if_raised(
    cause: Cause,
) -> Callable[[Callable[[DiagnosisContext, Sequence[Failure]], Explanation | None]], Rule]:
    """Return a decorator for diagnosis rules. The decorated rule applies only if the first failure has this cause."""

    def find(context: DiagnosisContext) -> tuple[Sequence[Failure]] | None:
        failures = [
            failure
            for failure in context.judgement.failures
            if not failure.is_collateral and cause.find_message(failure.text)
        ]
        is_first = bool(failures) and failures[0] is context.first_failure and failures[0].kind is FailureKind.RAISED
        return (failures,) if is_first else None

    return rule_if(find)


def _explain_errors(
    context: DiagnosisContext,
    failures: Sequence[Failure],
    cause: Cause,
    facts: Facts,
    *,
    evidence: EvidenceKind = EvidenceKind.RAISED,
    ranks: tuple[int, ...] | None = None,
    place: Place | None = None,
    step: int | None = None,
) -> Explanation:
    """Create the explanation for a run that ended with these errors, by default on the ranks and line that failed."""
    return Explanation(
        cause=cause,
        evidence=evidence,
        facts=facts,
        ranks=failed_ranks(failures) if ranks is None else ranks,
        place=place or _failure_place(context, failures[0]),
        proof=tuple(failure.exception.proof for failure in failures if failure.exception)[:1],
        step=step,
    )


@rule_if_raised(Cause.STATIC_GRAPH_CHANGED)
def static_graph_changed(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a DDP failure in which a `static_graph=True` model used different parameters in a later step."""
    first = failures[0]
    return _explain_errors(
        context,
        failures,
        Cause.STATIC_GRAPH_CHANGED,
        {
            "parameters": _named_parameters(first),
            "took_no_part": bool(_hints(first, "without gradient")),
            "are_new": bool(_hints(first, "newly used")),
        },
        step=_failed_step(context, first),
    )


@rule_if_raised(Cause.READY_TWICE)
def ready_twice(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a failure in which DDP found that a gradient became ready twice in one backward pass."""
    checkpoint = context.program.reentrant_checkpoint()
    return _explain_errors(
        context,
        failures,
        Cause.READY_TWICE,
        {"parameters": _named_parameters(failures[0]), "reentrant_checkpoint": checkpoint},
        place=_with_line(_failure_place(context, failures[0]), checkpoint),
        step=_failed_step(context, failures[0]),
    )


@rule_if_raised(Cause.CHECKPOINT_RECOMPUTE_MISMATCH)
def checkpoint_recompute_mismatch(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a failure in which activation checkpointing recomputed different tensors than it had saved."""
    hint = next(iter(_hints(failures[0], "recomputed")), None)
    return _explain_errors(
        context,
        failures,
        Cause.CHECKPOINT_RECOMPUTE_MISMATCH,
        {"function": hint.name if hint else "", "message": failures[0].text.partition("checkpoint: ")[2]},
        step=_failed_step(context, failures[0]),
    )


@rule_if_raised(Cause.INPLACE_MODIFICATION)
def inplace_modification(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a failure in which a tensor needed by the backward pass was modified in place."""
    hints = _hints(failures[0], "in place")
    output = Cause.INPLACE_MODIFICATION.find_message(failures[0].text)
    return _explain_errors(
        context,
        failures,
        Cause.INPLACE_MODIFICATION,
        {
            "operation": output[2] if output else "",
            "shape": output[1] if output else "",
            "line": _hint_place(context, failures[0], hints[0]) if len(hints) == 1 else None,
        },
        step=_failed_step(context, failures[0]),
    )


@rule_if_raised(Cause.MODEL_MISMATCH)
def model_mismatch(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a failure in which DDP found different models. A minority is at fault, or else all compared ranks."""
    models = _model_facts(context, failures)
    common_model, majority_count = Counter(map(repr, models.values())).most_common(1)[0]
    odd_ranks = tuple(rank for rank, model in sorted(models.items()) if repr(model) != common_model)
    has_majority = 2 * majority_count > len(context.evidence.ranks)
    return _explain_errors(
        context,
        [failure for failure in failures if failure.rank in odd_ranks] or failures,
        Cause.MODEL_MISMATCH,
        {"models": ranks_by_facts(sorted(models.items()))},
        ranks=odd_ranks if has_majority else tuple(sorted(models)),
        evidence=EvidenceKind.RAISED if has_majority else EvidenceKind.EFFECT,
    )


def _model_facts(context: DiagnosisContext, failures: Sequence[Failure]) -> dict[int, Facts]:
    """Return, for each rank, the facts about its model that PyTorch's error messages state."""
    counts = [match for failure in failures if (match := _COUNT_DIFFERS.search(failure.text))]
    if counts:
        models: dict[int, Facts] = {int(match[3]): {"parameters": match[4]} for match in counts}
        return models | {int(match[1]): {"parameters": match[2]} for match in counts}
    matches = {failure.rank: match for failure in failures if (match := _SHAPE_DIFFERS.search(failure.text))}
    shapes = {
        rank: {"parameter": match[1], "differs_in": match[2], "value": match[3]} for rank, match in matches.items()
    }
    return {rank.rank: shapes.get(rank.rank, {"same_as_rank": 0}) for rank in context.evidence.ranks}


@rule_if_raised(Cause.REENTRANT_NO_GRAD_INPUT)
def reentrant_no_grad_input(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation | None:
    """Explain a DDP failure in which a reentrant checkpoint computed no gradients.

    No input of the checkpoint requires a gradient, so its parameters get none, and DDP raises an error in the next
    step.
    """
    checkpoints = _checkpoints_without_grad_input(context)
    if failures[0].rank not in checkpoints:
        return None
    checkpoint = checkpoints[failures[0].rank]
    used_in = {hint.frame.function for hint in _hints(failures[0], "without gradient") if hint.frame}
    place = _failure_place(context, failures[0])
    return _explain_missing_gradients(
        context,
        failures,
        Cause.REENTRANT_NO_GRAD_INPUT,
        {"variant": "refused_by_ddp", "checkpoint": checkpoint},
        evidence=EvidenceKind.RAISED if used_in == {checkpoint.function} else EvidenceKind.OPEN,
        ranks=failed_ranks(failures),
        place=parameter_place(place.parameter if place else None, checkpoint),
    )


def silent_checkpoint(context: DiagnosisContext) -> Explanation | None:
    """Report a reentrant checkpoint that keeps its parameters from being trained, which fails only under DDP."""
    checkpoints = _checkpoints_without_grad_input(context)
    parameters_by_rank = {
        rank.rank: rank.health.without_gradient
        for rank in context.evidence.ranks
        if rank.rank in checkpoints and rank.health is not None and rank.health.without_gradient
    }
    if not parameters_by_rank or context.first_failure is not None:
        return None
    ranks = tuple(sorted(parameters_by_rank))
    parameters, checkpoint = parameters_by_rank[ranks[0]], checkpoints[ranks[0]]
    return Explanation(
        cause=Cause.REENTRANT_NO_GRAD_INPUT,
        evidence=EvidenceKind.RECORD,
        facts={"variant": "silent", "checkpoint": checkpoint, "parameters": parameters},
        ranks=ranks,
        place=parameter_place(parameters[0], checkpoint),
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


def _checkpoints_without_grad_input(context: DiagnosisContext) -> dict[int | None, Place]:
    """Map each rank to the line of its reentrant checkpoint whose inputs require no gradient."""
    return {
        rank: status_file.checkpoint_without_gradient
        for rank, status_file in context.status_files.items()
        if status_file.checkpoint_without_gradient
    }


@rule_if_raised(Cause.NO_GRADIENT)
def nothing_to_differentiate(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a failure in which `backward` was called on a tensor that depends on no parameter."""
    return _explain_errors(context, failures, Cause.NO_GRADIENT, {"variant": "refused"})


def find_unused_needless(context: DiagnosisContext) -> Explanation | None:
    """Report that DDP's `find_unused_parameters=True` was unnecessary in every step that is still recorded."""
    ranks = tuple(
        rank.rank for rank in context.evidence.ranks if any("find_unused" in warning for warning in rank.warnings)
    )
    was_needed = any(
        len(set(status_file.gradients.values())) > 1 or 1 not in status_file.gradients
        for status_file in context.status_files.values()
    )
    if not ranks or was_needed:
        return None
    return Explanation(
        cause=Cause.FIND_UNUSED_NEEDLESS, evidence=EvidenceKind.OPEN, ranks=ranks, proof=(f"rank{ranks[0]}/stderr.log",)
    )


def gradient_order_differs(context: DiagnosisContext) -> Explanation | None:
    """Report that gradients became ready in different orders on two ranks, which alone makes no run fail."""
    order, buckets = context.evidence.gradient_order, context.evidence.bucket_order
    if order is None:
        return None
    bucket_difference = buckets.difference if buckets else None
    return Explanation(
        cause=Cause.GRADIENT_ORDER_DIFFERS,
        evidence=EvidenceKind.RECORD,
        facts={
            "other_rank": order.other,
            "position": order.position,
            "parameter": order.name,
            "parameter_there": order.expected,
            "buckets": buckets.count if buckets else None,
            "swapped_buckets": (
                {"first": bucket_difference.name, "second": bucket_difference.expected, "rank": bucket_difference.rank}
                if bucket_difference
                else None
            ),
        },
        ranks=(order.rank,),
        place=parameter_place(order.name),
        step=order.step,
        proof=(f"grad_order_rank{order.rank}.jsonl", f"grad_order_rank{order.other}.jsonl"),
    )


@rule_if_raised(Cause.RANK_CONDITIONAL_UNUSED_PARAMS)
def rank_conditional_unused_params(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation | None:
    """Explain a DDP failure in which some ranks computed no gradient for parameters that others computed."""
    result = _ranks_lacking_gradients(context, failures)
    if result is None:
        return None
    ranks, evidence = result
    place = _failure_place(context, failures[0])
    module_branch = context.program.branch_around_module((place and place.module) or "")
    branch = module_branch or (context.program.guard(place) if place else None)
    return _explain_missing_gradients(
        context,
        failures,
        Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
        {
            "variant": "refused_by_ddp",
            "others": tuple(rank.rank for rank in context.evidence.ranks if rank.rank not in ranks),
            "others_waited": evidence is not EvidenceKind.OPEN,
        },
        evidence=evidence,
        ranks=ranks,
        place=_with_line(place, branch.place if branch else None),
    )


@rule_if_raised(Cause.UNUSED_PARAMS)
def unused_params(context: DiagnosisContext, failures: Sequence[Failure]) -> Explanation:
    """Explain a DDP failure in which some parameters received no gradient on any rank."""
    return _explain_missing_gradients(
        context,
        failures,
        Cause.UNUSED_PARAMS,
        {},
        evidence=EvidenceKind.RAISED if len(failures) == len(context.evidence.ranks) else EvidenceKind.EFFECT,
        ranks=tuple(rank.rank for rank in context.evidence.ranks),
    )


def _explain_missing_gradients(
    context: DiagnosisContext,
    failures: Sequence[Failure],
    cause: Cause,
    facts: Facts,
    *,
    evidence: EvidenceKind,
    ranks: tuple[int, ...],
    place: Place | None = None,
) -> Explanation:
    """Create the explanation for a DDP error about missing gradients, with parameters and gradient counts per rank."""
    step = _failed_step(context, failures[0])
    counts = (
        (rank, status_file.gradients[step])
        for rank, status_file in context.status_files.items()
        if step in status_file.gradients
    )
    gradients = ranks_by_facts((rank, {"gradients": count}) for rank, count in counts)
    return _explain_errors(
        context,
        failures,
        cause,
        {**facts, "parameters": _named_parameters(failures[0]), "gradients": gradients},
        evidence=evidence,
        ranks=ranks,
        place=place,
        step=step,
    )


def _ranks_lacking_gradients(
    context: DiagnosisContext, failures: Sequence[Failure]
) -> tuple[tuple[int, ...], EvidenceKind] | None:
    """Return the ranks that lack gradients computed on others in the failed step, and the kind of evidence, or None."""
    ranks = failed_ranks(failures)
    others = [rank for rank in context.evidence.ranks if rank.rank not in ranks]
    if not others:
        missing_parameters = {
            frozenset(hint.name for hint in _hints(failure, "without gradient")) for failure in failures
        }
        return (ranks, EvidenceKind.RAISED) if len(missing_parameters) > 1 else None
    step = _failed_step(context, failures[0])
    collective_count = max(_collective_count(rank) for rank in context.evidence.ranks if rank.rank in ranks)
    waiting = [
        _failed_in_backward(other) or (other.status_file is not None and other.status_file.enqueued > collective_count)
        for other in others
    ]
    in_failed_step = [
        other.status_file is not None
        and step is not None
        and other.status_file.step <= step
        and all(finished_step < step for finished_step, _ in other.status_file.steps_s)
        for other in others
    ]
    if not any(in_failed_step):
        return None
    # A rank that was not waiting may only have been late.
    return ranks, EvidenceKind.RECORD if all(waiting) and all(in_failed_step) else EvidenceKind.OPEN


def _failed_in_backward(rank: RankEvidence) -> bool:
    """Return whether the rank failed inside `backward`, where DDP waits for other ranks."""
    frames = rank.exception.frames if rank.exception else ()
    return in_function(frames, "torch/autograd/graph.py", ("_engine_run_backward",)) is not None


def _collective_count(rank: RankEvidence) -> int:
    last_numbers: dict[str, int] = {}
    for collective in rank.collectives:
        last_numbers[collective.group] = max(collective.seq, last_numbers.get(collective.group, 0))
    return max(sum(last_numbers.values()), rank.status_file.enqueued if rank.status_file else 0)


def _failed_step(context: DiagnosisContext, failure: Failure) -> int | None:
    """Return the step whose backward pass made the next forward pass fail, or None without a status file."""
    status_file = context.status_file(failure.rank)
    if status_file is None:
        return None
    is_unfinished = Cause.UNUSED_PARAMS.find_message(failure.text) is not None
    return status_file.step - 1 if is_unfinished and _noticed_in_next_step(context, status_file) else status_file.step


def _noticed_in_next_step(context: DiagnosisContext, status_file: StatusFile) -> bool:
    """Return whether DDP raised its error only in the step after the one that lacks gradients."""
    if status_file.step < 2:
        return False
    previous_step = status_file.step - 1
    other_counts = {
        other.gradients[previous_step] for other in context.status_files.values() if previous_step in other.gradients
    }
    lacks_gradients = status_file.gradients.get(previous_step, 0) < max(
        {*status_file.gradients.values(), *other_counts}, default=0
    )
    return lacks_gradients or status_file.position <= _FIRST_EVENTS


def _hints(failure: Failure, kind: str) -> list[Hint]:
    return [hint for hint in failure.exception.hints if hint.kind == kind] if failure.exception else []


def _named_parameters(failure: Failure) -> tuple[str, ...]:
    return tuple(hint.name for kind in _NAMING_PARAMETERS for hint in _hints(failure, kind))


def _failure_place(context: DiagnosisContext, failure: Failure) -> Place | None:
    """Return the program line that is responsible for the failure, or None if it is unknown."""
    hints = failure.exception.hints if failure.exception else ()
    located_hints = [hint for hint in hints if hint.frame is not None]
    if located_hints and (located_hints[0].kind != "in place" or len(located_hints) == 1):
        return _hint_place(context, failure, located_hints[0])
    frame = user_frame(failure.exception.frames) if failure.exception else None
    return place_of(context, failure.rank, frame)


def _hint_place(context: DiagnosisContext, failure: Failure, hint: Hint) -> Place:
    line = place_of(context, failure.rank, hint.frame) or Place()
    return parameter_place(hint.name, line) if hint.kind in _NAMING_PARAMETERS else line


def _with_line(place: Place | None, line: Place | None) -> Place | None:
    return place if line is None else replace(place or Place(), file=line.file, line=line.line, function=line.function)
