"""What autograd, DDP and checkpointing refuse: an exception raised inside torch, told in the program's own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import Case, Explanation, at, shorten
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import on_ranks
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.diagnosis.refused import hinted, hints_of, names_of, raised_so, ranks_of, refusal, step_of
from nsa_harness.core.verdict.verdict import Failure

_OTHER_COUNT, _OTHER_SHAPE = Cause.MODEL_MISMATCH.row.signatures


@rule(Phase.FIRST_FAILURE, Cause.STATIC_GRAPH_CHANGED, outranks=("unused_params",))
def static_graph_changed(case: Case) -> Explanation | None:
    changed = raised_so(case, Cause.STATIC_GRAPH_CHANGED)
    if not changed:
        return None
    first = changed[0]
    grown = f": {names_of(first)} took part for the first time" if hints_of(first, "newly used") else ""
    named = f": {names_of(first)} took no part" if hints_of(first, "without gradient") else grown
    return refusal(
        case,
        changed,
        f"the graph of step {step_of(case, first)} has other parameters than the first one{named}; DDP was told"
        " static_graph=True",
        cause=Cause.STATIC_GRAPH_CHANGED,
        step=step_of(case, first),
        confidence=0.95,
    )


@rule(Phase.FIRST_FAILURE, Cause.READY_TWICE, outranks=("exception",))
def ready_twice(case: Case) -> Explanation | None:
    twice = raised_so(case, Cause.READY_TWICE)
    if not twice:
        return None
    return refusal(
        case,
        twice,
        f"the gradient of {names_of(twice[0])} was ready twice in one backward pass of step {step_of(case, twice[0])}",
        cause=Cause.READY_TWICE,
        step=step_of(case, twice[0]),
        confidence=0.95,
    )


@rule(Phase.FIRST_FAILURE, Cause.CHECKPOINT_RECOMPUTE_MISMATCH, outranks=("exception",))
def checkpoint_recompute_mismatch(case: Case) -> Explanation | None:
    mismatch = raised_so(case, Cause.CHECKPOINT_RECOMPUTE_MISMATCH)
    if not mismatch:
        return None
    again = next(iter(hints_of(mismatch[0], "recomputed")), None)
    return refusal(
        case,
        mismatch,
        f"{ranks_text(ranks_of(mismatch))} computed {again.name if again else 'a checkpointed part'} otherwise for the"
        f" backward pass than in the forward pass of step {step_of(case, mismatch[0])}:"
        f" {shorten(mismatch[0].text.partition('checkpoint: ')[2])}",
        cause=Cause.CHECKPOINT_RECOMPUTE_MISMATCH,
        step=step_of(case, mismatch[0]),
        confidence=0.95,
    )


@rule(Phase.FIRST_FAILURE, Cause.INPLACE_MODIFICATION, outranks=("exception",))
def inplace_modification(case: Case) -> Explanation | None:
    modified = raised_so(case, Cause.INPLACE_MODIFICATION)
    if not modified:
        return None
    hints = hints_of(modified[0], "in place")
    what = Cause.INPLACE_MODIFICATION.said_in(modified[0].text)
    saved = f"the output of {what[2]}, shape [{what[1]}]" if what else "a saved tensor"
    where = f", probably{at(hinted(case, modified[0], hints[0]))}" if len(hints) == 1 else ""
    return refusal(
        case,
        modified,
        f"{ranks_text(ranks_of(modified))} changed {saved}, in place{where} before the backward pass of step"
        f" {step_of(case, modified[0])} needed it",
        cause=Cause.INPLACE_MODIFICATION,
        step=step_of(case, modified[0]),
        confidence=0.95,
        advice="Write y = x + ... instead of x += ..., or clone before. "
        + ("" if where else "The line is not known from one run: run again with --deepen for the forward line."),
    )


@rule(Phase.FIRST_FAILURE, Cause.MODEL_MISMATCH, outranks=("exception",))
def model_mismatch(case: Case) -> Explanation | None:
    """DDP compares the models as it is made; the ranks that differ from the most are the culprits."""
    differing = raised_so(case, Cause.MODEL_MISMATCH)
    if not differing:
        return None
    models = _models(case, differing)
    common, most = Counter(models.values()).most_common(1)[0]
    odd = tuple(rank for rank, model in sorted(models.items()) if model != common)
    clear = 2 * most > len(case.evidence.ranks)
    return refusal(
        case,
        [one for one in differing if one.rank in odd] or differing,
        f"DDP was given different models: {on_ranks(sorted(models.items()))}",
        ranks=odd if clear else tuple(sorted(models)),
        cause=Cause.MODEL_MISMATCH,
        confidence=0.95 if clear else 0.85,
    )


def _models(case: Case, differing: Sequence[Failure]) -> dict[int, str]:
    """What each rank's model is like, in torch's words; a rank that has no complaint is as rank 0."""
    counts = [found for one in differing if (found := _OTHER_COUNT.search(one.text))]
    if counts:
        heard = {int(found[3]): f"{found[4]} parameters" for found in counts}
        return heard | {int(found[1]): f"{found[2]} parameters" for found in counts}
    shapes = {one.rank: found for one in differing if (found := _OTHER_SHAPE.search(one.text))}
    told = {rank: f"parameter {one[1]} with {one[2]} [{one[3]}]" for rank, one in shapes.items() if rank is not None}
    return {rank.rank: told.get(rank.rank, "those of rank 0") for rank in case.evidence.ranks}
