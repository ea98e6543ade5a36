"""Rules about errors of autograd, DDP and checkpointing, and about gradients that DDP waits for in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    failed_ranks,
    parameter_place,
    place_of,
    ranks_by_facts,
)
from nsa_harness.core.diagnosis.explanation import Explanation, Rule, given
from nsa_harness.core.evidence.evidence import Hint, RankEvidence, StatusFile
from nsa_harness.core.evidence.stacks import in_function, user_frame
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.verdict import Failure, FailureKind

_OTHER_COUNT, _OTHER_SHAPE = Cause.MODEL_MISMATCH.row.signatures
_NAMING_PARAMETERS = ("without gradient", "ready twice", "newly used")  # kinds of hints that name a parameter
_FIRST_EVENTS = 3  # training events that open a step: a batch requested, a batch received, the forward of the model


def refusal(
    cause: Cause,
) -> Callable[[Callable[[DiagnosisContext, Sequence[Failure]], Explanation | None]], Rule]:
    """Make a rule that answers only if the first failure is an exception with a signature of `cause`.

    The function also takes all failures with such a signature, in order of time.
    """

    def find(context: DiagnosisContext) -> tuple[Sequence[Failure]] | None:
        refused = [
            failure for failure in context.judgement.failures if not failure.collateral and cause.said_in(failure.text)
        ]
        comes_first = bool(refused) and refused[0] is context.first_failure and refused[0].kind is FailureKind.RAISED
        return (refused,) if comes_first else None

    return given(find)


def _refused(
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
    """Return the explanation of these failures. Default: their ranks are at fault, at the place of the first one."""
    return Explanation(
        cause=cause,
        evidence=evidence,
        facts=facts,
        ranks=failed_ranks(failures) if ranks is None else ranks,
        place=place or _place(context, failures[0]),
        proof=tuple(failure.raised.proof for failure in failures if failure.raised)[:1],
        step=step,
    )


@refusal(Cause.STATIC_GRAPH_CHANGED)
def static_graph_changed(context: DiagnosisContext, changed: Sequence[Failure]) -> Explanation:
    first = changed[0]
    return _refused(
        context,
        changed,
        Cause.STATIC_GRAPH_CHANGED,
        {
            "parameters": _parameters(first),
            "took_no_part": bool(_hints(first, "without gradient")),
            "are_new": bool(_hints(first, "newly used")),
        },
        step=_step_of(context, first),
    )


@refusal(Cause.READY_TWICE)
def ready_twice(context: DiagnosisContext, twice: Sequence[Failure]) -> Explanation:
    checkpoint = context.program.reentrant_checkpoint()
    return _refused(
        context,
        twice,
        Cause.READY_TWICE,
        {"parameters": _parameters(twice[0]), "reentrant_checkpoint": checkpoint},
        place=_at_line(_place(context, twice[0]), checkpoint),
        step=_step_of(context, twice[0]),
    )


@refusal(Cause.CHECKPOINT_RECOMPUTE_MISMATCH)
def checkpoint_recompute_mismatch(context: DiagnosisContext, mismatch: Sequence[Failure]) -> Explanation:
    recomputed = next(iter(_hints(mismatch[0], "recomputed")), None)
    return _refused(
        context,
        mismatch,
        Cause.CHECKPOINT_RECOMPUTE_MISMATCH,
        {
            "function": recomputed.name if recomputed else "",
            "message": mismatch[0].text.partition("checkpoint: ")[2],
        },
        step=_step_of(context, mismatch[0]),
    )


@refusal(Cause.INPLACE_MODIFICATION)
def inplace_modification(context: DiagnosisContext, modified: Sequence[Failure]) -> Explanation:
    hints = _hints(modified[0], "in place")
    output = Cause.INPLACE_MODIFICATION.said_in(modified[0].text)
    return _refused(
        context,
        modified,
        Cause.INPLACE_MODIFICATION,
        {
            "operation": output[2] if output else "",
            "shape": output[1] if output else "",
            "line": _hinted_place(context, modified[0], hints[0]) if len(hints) == 1 else None,
        },
        step=_step_of(context, modified[0]),
    )


@refusal(Cause.MODEL_MISMATCH)
def model_mismatch(context: DiagnosisContext, differing: Sequence[Failure]) -> Explanation:
    """DDP's constructor found different models. The ranks that differ from the majority are at fault."""
    models = _models(context, differing)
    common, most = Counter(map(repr, models.values())).most_common(1)[0]
    odd = tuple(rank for rank, model in sorted(models.items()) if repr(model) != common)
    clear = 2 * most > len(context.evidence.ranks)
    return _refused(
        context,
        [failure for failure in differing if failure.rank in odd] or differing,
        Cause.MODEL_MISMATCH,
        {"models": ranks_by_facts(sorted(models.items()))},
        ranks=odd if clear else tuple(sorted(models)),
        evidence=EvidenceKind.RAISED if clear else EvidenceKind.EFFECT,
    )


def _models(context: DiagnosisContext, differing: Sequence[Failure]) -> dict[int, Facts]:
    """Return the facts about each rank's model from torch's messages: its number of parameters, or one that differs."""
    counts = [match for failure in differing if (match := _OTHER_COUNT.search(failure.text))]
    if counts:
        models: dict[int, Facts] = {int(match[3]): {"parameters": match[4]} for match in counts}
        return models | {int(match[1]): {"parameters": match[2]} for match in counts}
    unlike = {failure.rank: match for failure in differing if (match := _OTHER_SHAPE.search(failure.text))}
    shapes = {
        rank: {"parameter": match[1], "differs_in": match[2], "value": match[3]} for rank, match in unlike.items()
    }
    return {rank.rank: shapes.get(rank.rank, {"same_as_rank": 0}) for rank in context.evidence.ranks}


@refusal(Cause.REENTRANT_NO_GRAD_INPUT)
def reentrant_no_grad_input(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation | None:
    """A reentrant checkpoint whose inputs require no gradient computes none. DDP notices it in the next step."""
    checkpoints = _checkpoints_without_grad_input(context)
    if unfinished[0].rank not in checkpoints:
        return None
    checkpoint = checkpoints[unfinished[0].rank]
    used_in = {hint.frame.function for hint in _hints(unfinished[0], "without gradient") if hint.frame}
    place = _place(context, unfinished[0])
    return _left_without(
        context,
        unfinished,
        Cause.REENTRANT_NO_GRAD_INPUT,
        {"variant": "refused_by_ddp", "checkpoint": checkpoint},
        evidence=EvidenceKind.RAISED if used_in == {checkpoint.function} else EvidenceKind.OPEN,
        ranks=failed_ranks(unfinished),
        place=parameter_place(place.parameter if place else None, checkpoint),
    )


def silent_checkpoint(context: DiagnosisContext) -> Explanation | None:
    """A reentrant checkpoint whose inputs require no gradient, without DDP: nothing fails, and nothing is trained."""
    checkpoints = _checkpoints_without_grad_input(context)
    without = {
        rank.rank: rank.health.without_gradient
        for rank in context.evidence.ranks
        if rank.rank in checkpoints and rank.health is not None and rank.health.without_gradient
    }
    if not without or context.first_failure is not None:
        return None
    ranks = tuple(sorted(without))
    parameters, checkpoint = without[ranks[0]], checkpoints[ranks[0]]
    return Explanation(
        cause=Cause.REENTRANT_NO_GRAD_INPUT,
        evidence=EvidenceKind.RECORD,
        facts={"variant": "silent", "checkpoint": checkpoint, "parameters": parameters},
        ranks=ranks,
        place=parameter_place(parameters[0], checkpoint),
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


def _checkpoints_without_grad_input(context: DiagnosisContext) -> dict[int | None, Place]:
    return {
        rank: board.checkpoint_without_gradient
        for rank, board in context.boards.items()
        if board.checkpoint_without_gradient
    }


@refusal(Cause.NO_GRADIENT)
def nothing_to_differentiate(context: DiagnosisContext, refused: Sequence[Failure]) -> Explanation:
    """The program called backward on a tensor that depends on no parameter."""
    return _refused(context, refused, Cause.NO_GRADIENT, {"variant": "refused"})


def find_unused_needless(context: DiagnosisContext) -> Explanation | None:
    """DDP searches for unused parameters, but every recorded step used all of them.

    torch warns of it after the first step. A status file keeps the gradient counts of a limited number of steps, so an
    older step may have needed the search.
    """
    ranks = tuple(
        rank.rank for rank in context.evidence.ranks if any("find_unused" in words for words in rank.warnings)
    )
    needed = any(
        len(set(board.gradients.values())) > 1 or 1 not in board.gradients for board in context.boards.values()
    )
    if not ranks or needed:
        return None
    return Explanation(
        cause=Cause.FIND_UNUSED_NEEDLESS,
        evidence=EvidenceKind.OPEN,
        ranks=ranks,
        proof=(f"rank{ranks[0]}/stderr.log",),
    )


def gradient_order_differs(context: DiagnosisContext) -> Explanation | None:
    """Gradients became ready in another order on two ranks, so their graphs may differ.

    Nothing fails, because every rank reduces the buckets in the order of rank 0.
    """
    order, buckets = context.evidence.gradient_order, context.evidence.bucket_order
    if order is None:
        return None
    swapped = buckets.difference if buckets else None
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
                {"first": swapped.name, "second": swapped.expected, "rank": swapped.rank} if swapped else None
            ),
        },
        ranks=(order.rank,),
        place=parameter_place(order.name),
        step=order.step,
        proof=(f"grad_order_rank{order.rank}.jsonl", f"grad_order_rank{order.other}.jsonl"),
    )


@refusal(Cause.RANK_CONDITIONAL_UNUSED_PARAMS)
def rank_conditional_unused_params(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation | None:
    """Some ranks computed no gradient for parameters whose gradients the other ranks computed and waited for."""
    differing = _differing(context, unfinished)
    if differing is None:
        return None
    ranks, evidence = differing
    place = _place(context, unfinished[0])
    around = context.program.branch_around_module((place and place.module) or "")
    decides = around or (context.program.guard(place) if place else None)
    return _left_without(
        context,
        unfinished,
        Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
        {
            "variant": "refused_by_ddp",
            "others": tuple(rank.rank for rank in context.evidence.ranks if rank.rank not in ranks),
            "others_waited": evidence is not EvidenceKind.OPEN,
        },
        evidence=evidence,
        ranks=ranks,
        place=_at_line(place, decides.place if decides else None),
    )


@refusal(Cause.UNUSED_PARAMS)
def unused_params(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation:
    return _left_without(
        context,
        unfinished,
        Cause.UNUSED_PARAMS,
        {},
        evidence=EvidenceKind.RAISED if len(unfinished) == len(context.evidence.ranks) else EvidenceKind.EFFECT,
        ranks=tuple(rank.rank for rank in context.evidence.ranks),
    )


def _left_without(
    context: DiagnosisContext,
    unfinished: Sequence[Failure],
    cause: Cause,
    facts: Facts,
    *,
    evidence: EvidenceKind,
    ranks: tuple[int, ...],
    place: Place | None = None,
) -> Explanation:
    """Return the explanation of missing gradients, with their parameters and each rank's number of gradients."""
    step = _step_of(context, unfinished[0])
    counts = ((rank, board.gradients[step]) for rank, board in context.boards.items() if step in board.gradients)
    gradients = ranks_by_facts((rank, {"gradients": count}) for rank, count in counts)
    return _refused(
        context,
        unfinished,
        cause,
        {**facts, "parameters": _parameters(unfinished[0]), "gradients": gradients},
        evidence=evidence,
        ranks=ranks,
        place=place,
        step=step,
    )


def _differing(context: DiagnosisContext, unfinished: Sequence[Failure]) -> tuple[tuple[int, ...], EvidenceKind] | None:
    """Return the ranks that lacked gradients which other ranks had, and the evidence; None if all lacked the same."""
    ranks = failed_ranks(unfinished)
    others = [rank for rank in context.evidence.ranks if rank.rank not in ranks]
    if not others:
        missing = {frozenset(hint.name for hint in _hints(failure, "without gradient")) for failure in unfinished}
        return (ranks, EvidenceKind.RAISED) if len(missing) > 1 else None
    step = _step_of(context, unfinished[0])
    entered = max(_entered(rank) for rank in context.evidence.ranks if rank.rank in ranks)
    waited = [
        _waited(other) or (other.status_file is not None and other.status_file.enqueued > entered) for other in others
    ]
    late = [
        other.status_file is not None
        and step is not None
        and other.status_file.step <= step
        and all(done < step for done, _ in other.status_file.steps_s)
        for other in others
    ]
    if not any(late):
        return None
    # If some other rank did not wait, it may only have been late.
    return ranks, EvidenceKind.RECORD if all(waited) and all(late) else EvidenceKind.OPEN


def _waited(rank: RankEvidence) -> bool:
    """Return whether the rank failed in backward, where DDP waits for the other ranks after its own last gradient."""
    frames = rank.exception.frames if rank.exception else ()
    return in_function(frames, "torch/autograd/graph.py", ("_engine_run_backward",)) is not None


def _entered(rank: RankEvidence) -> int:
    """Return how many collectives the rank entered. Its flight recorder also has those after the last heartbeat."""
    newest: dict[str, int] = {}
    for collective in rank.collectives:
        newest[collective.group] = max(collective.seq, newest.get(collective.group, 0))
    return max(sum(newest.values()), rank.status_file.enqueued if rank.status_file else 0)


def _step_of(context: DiagnosisContext, failure: Failure) -> int | None:
    """Return the step whose backward pass went wrong. DDP may notice only in the forward pass of the next step."""
    board = context.board(failure.rank)
    if board is None:
        return None
    unfinished = Cause.UNUSED_PARAMS.said_in(failure.text) is not None
    return board.step - 1 if unfinished and _noticed_later(context, board) else board.step


def _noticed_later(context: DiagnosisContext, board: StatusFile) -> bool:
    """Return whether the error came in the first forward pass after a step, or that step lacked gradients."""
    if board.step < 2:
        return False
    before = board.step - 1
    seen = {other.gradients[before] for other in context.boards.values() if before in other.gradients}
    lacked = board.gradients.get(before, 0) < max({*board.gradients.values(), *seen}, default=0)
    return lacked or board.position <= _FIRST_EVENTS


def _hints(failure: Failure, kind: str) -> list[Hint]:
    return [hint for hint in failure.raised.hints if hint.kind == kind] if failure.raised else []


def _parameters(failure: Failure) -> tuple[str, ...]:
    """Return the parameters to which torch's message refers, if the probe found their names."""
    return tuple(hint.name for kind in _NAMING_PARAMETERS for hint in _hints(failure, kind))


def _place(context: DiagnosisContext, failure: Failure) -> Place | None:
    """Return the program's line that the probe found for the failure, else the line that called torch."""
    hints = failure.raised.hints if failure.raised else ()
    placed = [hint for hint in hints if hint.frame is not None]
    if placed and (placed[0].kind != "in place" or len(placed) == 1):
        return _hinted_place(context, failure, placed[0])
    frame = user_frame(failure.raised.frames) if failure.raised else None
    return place_of(context, failure.rank, frame)


def _hinted_place(context: DiagnosisContext, failure: Failure, hint: Hint) -> Place:
    """Return the line that the probe found, with the parameter if the hint names one."""
    line = place_of(context, failure.rank, hint.frame) or Place()
    return parameter_place(hint.name, line) if hint.kind in _NAMING_PARAMETERS else line


def _at_line(place: Place | None, line: Place | None) -> Place | None:
    """Return `place` with its parameter and module, but at another line."""
    return place if line is None else replace(place or Place(), file=line.file, line=line.line, function=line.function)
