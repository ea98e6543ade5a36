"""What autograd, DDP and checkpointing refuse: an exception raised inside torch, told in the program's own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import Case, at, shorten
from nsa_harness.core.diagnosis.entries import on_ranks
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.refused import (
    IN_PLACE,
    OTHER_COUNT,
    OTHER_SHAPE,
    READY_TWICE,
    RECOMPUTED,
    STATIC_GRAPH,
    hinted,
    hints_of,
    names_of,
    raised_so,
    ranks_of,
    refusal,
    step_of,
)
from nsa_harness.core.report import Finding
from nsa_harness.core.verdict.verdict import Failure


def static_graph_changed(case: Case) -> Finding | None:
    changed = raised_so(case, STATIC_GRAPH)
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
        code="static_graph_changed",
        confidence=0.95,
        advice="Use the same parameters in every step, or construct DDP without static_graph=True (with"
        " find_unused_parameters=True where a step may leave some out).",
    )


def ready_twice(case: Case) -> Finding | None:
    twice = raised_so(case, READY_TWICE)
    if not twice:
        return None
    return refusal(
        case,
        twice,
        f"the gradient of {names_of(twice[0])} was ready twice in one backward pass of step {step_of(case, twice[0])}",
        code="ready_twice",
        confidence=0.95,
        advice="A module is used by several reentrant checkpoints, or inside one and outside: pass use_reentrant=False,"
        " or construct DDP with static_graph=True.",
    )


def checkpoint_recompute_mismatch(case: Case) -> Finding | None:
    mismatch = raised_so(case, RECOMPUTED)
    if not mismatch:
        return None
    again = next(iter(hints_of(mismatch[0], "recomputed")), None)
    return refusal(
        case,
        mismatch,
        f"{ranks_text(ranks_of(mismatch))} computed {again.name if again else 'a checkpointed part'} otherwise for the"
        f" backward pass than in the forward pass of step {step_of(case, mismatch[0])}:"
        f" {shorten(mismatch[0].text.partition('checkpoint: ')[2])}",
        code="checkpoint_recompute_mismatch",
        confidence=0.95,
        advice="What is checkpointed may depend on its arguments alone: look for a counter, a global, a random branch"
        " or autocast that differs when it runs again. Run again with --deepen for the operation that differs.",
    )


def inplace_modification(case: Case) -> Finding | None:
    modified = raised_so(case, IN_PLACE)
    if not modified:
        return None
    hints = hints_of(modified[0], "in place")
    what = IN_PLACE.search(modified[0].text)
    saved = f"the output of {what[2]}, shape [{what[1]}]" if what else "a saved tensor"
    where = f", probably{at(hinted(case, modified[0], hints[0]))}" if len(hints) == 1 else ""
    return refusal(
        case,
        modified,
        f"{ranks_text(ranks_of(modified))} changed {saved}, in place{where} before the backward pass of step"
        f" {step_of(case, modified[0])} needed it",
        code="inplace_modification",
        confidence=0.95,
        advice="Write y = x + ... instead of x += ..., or clone before. "
        + ("" if where else "The line is not known from one run: run again with --deepen for the forward line."),
    )


def model_mismatch(case: Case) -> Finding | None:
    """DDP compares the models as it is made; the ranks that differ from the most are the culprits."""
    differing = raised_so(case, OTHER_COUNT) or raised_so(case, OTHER_SHAPE)
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
        code="model_mismatch",
        confidence=0.95 if clear else 0.85,
        advice="Build the model from the same configuration on every rank; look for what the rank, its data or a"
        " file of its own decides about layers and sizes.",
    )


def _models(case: Case, differing: Sequence[Failure]) -> dict[int, str]:
    """What each rank's model is like, in torch's words; a rank that has no complaint is as rank 0."""
    counts = [found for one in differing if (found := OTHER_COUNT.search(one.text))]
    if counts:
        heard = {int(found[3]): f"{found[4]} parameters" for found in counts}
        return heard | {int(found[1]): f"{found[2]} parameters" for found in counts}
    shapes = {one.rank: found for one in differing if (found := OTHER_SHAPE.search(one.text))}
    told = {rank: f"parameter {one[1]} with {one[2]} [{one[3]}]" for rank, one in shapes.items() if rank is not None}
    return {rank.rank: told.get(rank.rank, "those of rank 0") for rank in case.evidence.ranks}
