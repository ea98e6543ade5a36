"""What autograd, DDP and checkpointing refuse, in the program's own names, and the gradients that DDP misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.collective_text import on_ranks
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    counted,
    parameter_place,
    place_of,
    ranks_of,
    shorten,
)
from nsa_harness.core.diagnosis.explanation import Explanation, Rule, explained, given
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.evidence import Hint, RankEvidence, StatusFile
from nsa_harness.core.evidence.stacks import in_function, user_frame
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import Failure, FailureKind

_OTHER_COUNT, _OTHER_SHAPE = Cause.MODEL_MISMATCH.row.signatures
_OF_PARAMETERS = ("without gradient", "ready twice", "newly used")  # kinds of hints
_SHOWN = 3
_FIRST_MARKS = 3  # a batch asked for, a batch got, the forward of the whole model


def refusal(
    cause: Cause,
) -> Callable[[Callable[[DiagnosisContext, Sequence[Failure]], Explanation | None]], Rule]:
    """Makes a rule of a function that is asked where torch refused something in the words of that cause.

    It is given the failures that say so, the first in time in front; where something else failed first it is not asked.
    """

    def refused(context: DiagnosisContext) -> tuple[Sequence[Failure]] | None:
        said = [one for one in context.judgement.failures if not one.collateral and cause.said_in(one.text)]
        comes_first = bool(said) and said[0] is context.first_failure and said[0].kind is FailureKind.RAISED
        return (said,) if comes_first else None

    return given(refused)


@refusal(Cause.STATIC_GRAPH_CHANGED)
def static_graph_changed(context: DiagnosisContext, changed: Sequence[Failure]) -> Explanation:
    first = changed[0]
    grown = f": {_names(first)} took part for the first time" if _hints(first, "newly used") else ""
    named = f": {_names(first)} took no part" if _hints(first, "without gradient") else grown
    return _refusal(
        context,
        changed,
        f"the graph of step {_step_of(context, first)} has other parameters than the first one{named}; DDP was told"
        " static_graph=True",
        cause=Cause.STATIC_GRAPH_CHANGED,
        step=_step_of(context, first),
        evidence=EvidenceKind.RAISED,
    )


@refusal(Cause.READY_TWICE)
def ready_twice(context: DiagnosisContext, twice: Sequence[Failure]) -> Explanation:
    reentrant = context.program.reentrant_checkpoint()
    found = _refusal(
        context,
        twice,
        f"the gradient of {_names(twice[0])} was ready twice in one backward pass of step {_step_of(context, twice[0])}"
        f"{f'; a reentrant checkpoint{at(reentrant)} runs backward passes of its own' if reentrant else ''}",
        cause=Cause.READY_TWICE,
        step=_step_of(context, twice[0]),
        evidence=EvidenceKind.RAISED,
    )
    return _moved(found, reentrant)


@refusal(Cause.CHECKPOINT_RECOMPUTE_MISMATCH)
def checkpoint_recompute_mismatch(context: DiagnosisContext, mismatch: Sequence[Failure]) -> Explanation:
    again = next(iter(_hints(mismatch[0], "recomputed")), None)
    return _refusal(
        context,
        mismatch,
        f"{ranks_text(ranks_of(mismatch))} computed {again.name if again else 'a checkpointed part'} otherwise for the"
        f" backward pass than in the forward pass of step {_step_of(context, mismatch[0])}:"
        f" {shorten(mismatch[0].text.partition('checkpoint: ')[2])}",
        cause=Cause.CHECKPOINT_RECOMPUTE_MISMATCH,
        step=_step_of(context, mismatch[0]),
        evidence=EvidenceKind.RAISED,
    )


@refusal(Cause.INPLACE_MODIFICATION)
def inplace_modification(context: DiagnosisContext, modified: Sequence[Failure]) -> Explanation:
    hints = _hints(modified[0], "in place")
    what = Cause.INPLACE_MODIFICATION.said_in(modified[0].text)
    saved = f"the output of {what[2]}, shape [{what[1]}]" if what else "a saved tensor"
    where = f", probably{at(_hinted_place(context, modified[0], hints[0]))}" if len(hints) == 1 else ""
    return _refusal(
        context,
        modified,
        f"{ranks_text(ranks_of(modified))} changed {saved}, in place{where} before the backward pass of step"
        f" {_step_of(context, modified[0])} needed it",
        cause=Cause.INPLACE_MODIFICATION,
        step=_step_of(context, modified[0]),
        evidence=EvidenceKind.RAISED,
        advice="Write y = x + ... instead of x += ..., or clone before. "
        + ("" if where else "The line is not known from one run: run again with --deepen for the forward line."),
    )


@refusal(Cause.MODEL_MISMATCH)
def model_mismatch(context: DiagnosisContext, differing: Sequence[Failure]) -> Explanation:
    """DDP compares the models as it is made; the ranks that differ from the most are the culprits."""
    models = _models(context, differing)
    common, most = Counter(models.values()).most_common(1)[0]
    odd = tuple(rank for rank, model in sorted(models.items()) if model != common)
    clear = 2 * most > len(context.evidence.ranks)
    return _refusal(
        context,
        [one for one in differing if one.rank in odd] or differing,
        f"DDP was given different models: {on_ranks(sorted(models.items()))}",
        ranks=odd if clear else tuple(sorted(models)),
        cause=Cause.MODEL_MISMATCH,
        evidence=EvidenceKind.RAISED if clear else EvidenceKind.EFFECT,
    )


def _models(context: DiagnosisContext, differing: Sequence[Failure]) -> dict[int, str]:
    """What each rank's model is like, in torch's words; a rank that has no complaint is as rank 0."""
    counts = [found for one in differing if (found := _OTHER_COUNT.search(one.text))]
    if counts:
        heard = {int(found[3]): f"{found[4]} parameters" for found in counts}
        return heard | {int(found[1]): f"{found[2]} parameters" for found in counts}
    shapes = {one.rank: found for one in differing if (found := _OTHER_SHAPE.search(one.text))}
    models = {rank: f"parameter {one[1]} with {one[2]} [{one[3]}]" for rank, one in shapes.items() if rank is not None}
    return {rank.rank: models.get(rank.rank, "those of rank 0") for rank in context.evidence.ranks}


@refusal(Cause.REENTRANT_NO_GRAD_INPUT)
def reentrant_no_grad_input(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation | None:
    """What a reentrant checkpoint computed from inputs without a gradient never learns; DDP misses it a step later."""
    unfed = _unfed(context)
    if unfinished[0].rank not in unfed:
        return None
    place = unfed[unfinished[0].rank]
    used = [hint.frame.function for hint in _hints(unfinished[0], "without gradient") if hint.frame]
    found = _left_without(
        context,
        unfinished,
        ranks_of(unfinished),
        f"a reentrant checkpoint{at(place)} got inputs of which none requires a gradient, so"
        f" {_names(unfinished[0])} had none",
        cause=Cause.REENTRANT_NO_GRAD_INPUT,
        evidence=EvidenceKind.RAISED if used and set(used) == {place.function} else EvidenceKind.OPEN,
    )
    name = found.place.parameter if found.place else None
    return replace(found, place=parameter_place(name, place))


@refusal(Cause.NO_GRADIENT)
def nothing_to_differentiate(context: DiagnosisContext, refused: Sequence[Failure]) -> Explanation:
    """A backward pass from a tensor that no parameter leads to."""
    return _refusal(
        context,
        refused,
        f"the backward pass of {ranks_text(ranks_of(refused))} began at a tensor that no parameter that requires a"
        " gradient leads to",
        cause=Cause.NO_GRADIENT,
        evidence=EvidenceKind.RAISED,
        advice="Look for what ended the graph: gradients switched off and not on again (set_grad_enabled, no_grad,"
        " inference_mode), detach or .item() before the loss, a model that is frozen whole.",
    )


def silent_checkpoint(context: DiagnosisContext) -> Explanation | None:
    """The same without DDP, which nobody notices: the parameters never have a gradient."""
    unfed = _unfed(context)
    without = {
        rank.rank: rank.looks.never
        for rank in context.evidence.ranks
        if rank.rank in unfed and rank.looks is not None and rank.looks.never
    }
    if not without or context.first_failure is not None:
        return None
    first = min(without)
    names = ", ".join(without[first][:_SHOWN])
    return explained(
        Cause.REENTRANT_NO_GRAD_INPUT,
        f"a reentrant checkpoint{at(unfed[first])} got inputs of which none requires a gradient, and parameters never"
        f" had one: {names}",
        ranks=tuple(sorted(without)),
        place=parameter_place(without[first][0], unfed[first]),
        evidence=EvidenceKind.RECORD,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in sorted(without)),
    )


def find_unused_needless(context: DiagnosisContext) -> Explanation | None:
    """torch says so itself, after the first step; what a later step leaves out it cannot know, and the counts tell.

    Of a run that is longer than what a board remembers of its steps they do not tell it.
    """
    ranks = tuple(rank.rank for rank in context.evidence.ranks if any("find_unused" in words for words in rank.warned))
    needed = any(
        len(set(board.gradients.values())) > 1 or 1 not in board.gradients for board in context.boards.values()
    )
    if not ranks or needed:
        return None
    return explained(
        Cause.FIND_UNUSED_NEEDLESS,
        "DDP was given find_unused_parameters=True and found nothing unused in any step of this run: it walks"
        " the graph in each of them for that",
        ranks=ranks,
        evidence=EvidenceKind.OPEN,
        proof=(f"rank{ranks[0]}/stderr.log",),
    )


def gradient_order_differs(context: DiagnosisContext) -> Explanation | None:
    """A fact, and a sign that the ranks' graphs differ; the reduction itself keeps rank 0's order of buckets."""
    one, buckets = context.evidence.gradient_order, context.evidence.buckets_ready
    if one is None:
        return None
    ready = ""
    if buckets is not None and buckets.differs is None:
        ready = f"; {counted(buckets.count, 'bucket')} of DDP became ready in the same order all the same"
    elif buckets is not None and (two := buckets.differs) is not None:
        ready = f"; of DDP's buckets {two.name} was ready before {two.expected} on rank {two.rank}"
    return explained(
        Cause.GRADIENT_ORDER_DIFFERS,
        f"in step {one.step} the gradients of rank {one.rank} arrived in another order than those of rank {one.other}:"
        f" number {one.position} was {one.name}, there {one.expected}{ready}",
        ranks=(one.rank,),
        place=parameter_place(one.name),
        evidence=EvidenceKind.RECORD,
        proof=(f"grad_order_rank{one.rank}.jsonl", f"grad_order_rank{one.other}.jsonl"),
    )


@refusal(Cause.RANK_CONDITIONAL_UNUSED_PARAMS)
def rank_conditional_unused_params(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation | None:
    """Some ranks computed no gradient for parameters for which the others did, and waited."""
    differing = _differing(context, unfinished)
    if differing is None:
        return None
    ranks, seen = differing
    others = [rank.rank for rank in context.evidence.ranks if rank.rank not in ranks]
    did = "computed it and waited" if seen is not EvidenceKind.OPEN else "did not finish that step"
    waiting = f"; {ranks_text(others)} {did}" if others else ", each another"
    found = _left_without(
        context,
        unfinished,
        ranks,
        f"{ranks_text(ranks)} computed no gradient for {_names(unfinished[0])}",
        tail=waiting,
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
        evidence=seen,
    )
    found = replace(found, facts={**found.facts, "ddp_refused": True})
    around = context.program.branch_around_module((found.place and found.place.module) or "")
    decides = around or (context.program.guard(found.place) if found.place else None)
    return _moved(found, decides.place if decides else None)


def _moved(found: Explanation, to: Place | None) -> Explanation:
    """With another line of the same parameter."""
    if to is None:
        return found
    place = replace(found.place or Place(), file=to.file, line=to.line, function=to.function)
    return replace(found, place=place)


@refusal(Cause.UNUSED_PARAMS)
def unused_params(context: DiagnosisContext, unfinished: Sequence[Failure]) -> Explanation:
    return _left_without(
        context,
        unfinished,
        tuple(rank.rank for rank in context.evidence.ranks),
        f"no rank computed a gradient for {_names(unfinished[0])}",
        cause=Cause.UNUSED_PARAMS,
        evidence=EvidenceKind.RAISED if len(unfinished) == len(context.evidence.ranks) else EvidenceKind.EFFECT,
    )


def _differing(context: DiagnosisContext, unfinished: Sequence[Failure]) -> tuple[tuple[int, ...], EvidenceKind] | None:
    """The ranks that lacked gradients which others had, and how sure that is; None where all lacked the same."""
    ranks = ranks_of(unfinished)
    others = [rank for rank in context.evidence.ranks if rank.rank not in ranks]
    if not others:
        missing = {frozenset(hint.name for hint in _hints(one, "without gradient")) for one in unfinished}
        return (ranks, EvidenceKind.RAISED) if len(missing) > 1 else None
    step = _step_of(context, unfinished[0])
    entered = max(_entered(rank) for rank in context.evidence.ranks if rank.rank in ranks)
    waited = [_waited(other) or (other.board is not None and other.board.enqueued > entered) for other in others]
    late = [
        other.board is not None
        and step is not None
        and other.board.step <= step
        and all(done < step for done, _ in other.board.steps_s)
        for other in others
    ]
    if not any(late):
        return None
    # The others may only have been late.
    return ranks, EvidenceKind.RECORD if all(waited) and all(late) else EvidenceKind.OPEN


def _waited(rank: RankEvidence) -> bool:
    """Its backward pass failed for want of a peer: DDP waits there only once it has every gradient of its own."""
    frames = rank.raised.frames if rank.raised else ()
    return in_function(frames, "torch/autograd/graph.py", ("_engine_run_backward",)) is not None


def _entered(rank: RankEvidence) -> int:
    """How many collectives it entered: the recorder at its exit knows those that the last beat did not see."""
    newest: dict[str, int] = {}
    for one in rank.collectives:
        newest[one.group] = max(one.seq, newest.get(one.group, 0))
    return max(sum(newest.values()), rank.board.enqueued if rank.board else 0)


def _left_without(
    context: DiagnosisContext,
    unfinished: Sequence[Failure],
    ranks: tuple[int, ...],
    claim: str,
    *,
    cause: Cause,
    evidence: EvidenceKind,
    advice: str | None = None,
    tail: str = "",
) -> Explanation:
    """Gradients that were missing: the line that uses the parameters, and how many there were a rank."""
    step = _step_of(context, unfinished[0])
    counts = [(rank, f"{board.gradients[step]}") for rank, board in context.boards.items() if step in board.gradients]
    had = f" (gradients in step {step}: {on_ranks(counts)})" if counts else ""
    return _refusal(
        context,
        unfinished,
        f"{claim} in step {step}{tail}{had}",
        cause=cause,
        ranks=ranks,
        evidence=evidence,
        advice=advice,
        step=step,
    )


def _unfed(context: DiagnosisContext) -> dict[int | None, Place]:
    return {rank: board.unfed_checkpoint for rank, board in context.boards.items() if board.unfed_checkpoint}


def _step_of(context: DiagnosisContext, failure: Failure) -> int | None:
    """The step whose backward pass went wrong: the one before, where the next forward pass of DDP found out."""
    board = context.board(failure.rank)
    if board is None:
        return None
    unfinished = Cause.UNUSED_PARAMS.said_in(failure.text) is not None
    return board.step - 1 if unfinished and _found_out_later(context, board) else board.step


def _refusal(
    context: DiagnosisContext,
    failures: Sequence[Failure],
    claim: str,
    *,
    cause: Cause,
    evidence: EvidenceKind,
    advice: str | None = None,
    ranks: tuple[int, ...] | None = None,
    step: int | None = None,
) -> Explanation:
    return explained(
        cause,
        claim,
        ranks=ranks_of(failures) if ranks is None else ranks,
        place=_place(context, failures[0]),
        evidence=evidence,
        proof=tuple(one.raised.proof for one in failures if one.raised)[:1],
        advice=advice,
        step=step,
    )


def _hinted_place(context: DiagnosisContext, failure: Failure, hint: Hint) -> Place:
    """The line that the probe found, of the parameter that it means."""
    line = place_of(context, failure.rank, hint.frame) or Place()
    return parameter_place(hint.name, line) if hint.kind in _OF_PARAMETERS else line


def _hints(failure: Failure, kind: str) -> list[Hint]:
    return [hint for hint in failure.raised.hints if hint.kind == kind] if failure.raised else []


def _names(failure: Failure) -> str:
    names = [hint.name for kind in _OF_PARAMETERS for hint in _hints(failure, kind)]
    if not names:
        return "some of its parameters"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{counted(len(names), 'parameter')} ({', '.join(names[:_SHOWN])}{more})" if names[1:] else names[0]


def _place(context: DiagnosisContext, failure: Failure) -> Place | None:
    """The user's line that the probe found for it; else the one that called torch."""
    hints = failure.raised.hints if failure.raised else ()
    placed = [hint for hint in hints if hint.frame is not None]
    if placed and (placed[0].kind != "in place" or len(placed) == 1):
        return _hinted_place(context, failure, placed[0])
    frame = user_frame(failure.raised.frames) if failure.raised else None
    return place_of(context, failure.rank, frame)


def _found_out_later(context: DiagnosisContext, board: StatusFile) -> bool:
    """Nothing but the first forward pass has begun since the last optimizer step, or that step lacked gradients."""
    if board.step < 2:
        return False
    before = board.step - 1
    seen = {one.gradients[before] for one in context.boards.values() if before in one.gradients}
    lacked = board.gradients.get(before, 0) < max({*board.gradients.values(), *seen}, default=0)
    return lacked or board.position <= _FIRST_MARKS
