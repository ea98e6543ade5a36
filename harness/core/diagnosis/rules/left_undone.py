"""Rules about what a run left undone without a word: batches, waits for collectives, first values of parameters."""

from __future__ import annotations

from nsa_harness.core.diagnosis.case import Case, Explanation, at, counted, explained, layer_of
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.grades import Seen
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.report import Place


@rule(RulePhase.SILENT, Cause.UNWAITED_COLLECTIVE, outranks=("nan",))
def unwaited_collective(case: Case) -> Explanation | None:
    """A line of the program that calls a collective asynchronously, and never asked any of its handles."""
    lines = [(rank.rank, one) for rank in case.evidence.ranks for one in (rank.looks.unwaited if rank.looks else ())]
    if not lines:
        return None
    _, first = lines[0]
    ranks = tuple(sorted({rank for rank, one in lines if (one.op, one.place) == (first.op, first.place)}))
    others = len({one.place for _, one in lines}) - 1
    more = f", and {counted(others, 'more line')} did not either" if others else ""
    return explained(
        Cause.UNWAITED_COLLECTIVE,
        f"{ranks_text(ranks)} started {counted(first.calls, f'asynchronous {first.op}')}{at(first.place)}, and asked"
        f" none of them whether it is done{more}",
        ranks=ranks,
        place=first.place,
        seen=Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


@rule(RulePhase.SILENT, Cause.SWALLOWED_EXCEPTION, outranks=("nan",), outranked_by=("unwaited_collective",))
def batches_given_up(case: Case) -> Explanation | None:
    """An exception that ended training passes, was caught, and cost their batches; alike on all ranks it stops none."""
    lost = [(rank.rank, one) for rank in case.evidence.ranks for one in (rank.looks.given_up if rank.looks else ())]
    if not lost:
        return None
    _, first = min(lost, key=lambda one: one[1].step)
    alike = [(rank, one) for rank, one in lost if (one.type, one.place) == (first.type, first.place)]
    ranks = tuple(sorted({rank for rank, _ in alike}))
    most = max(one.batches for _, one in alike)
    others = len({(one.type, one.place) for _, one in lost}) - 1
    more = f", as did {counted(others, 'other exception')}" if others else ""
    return explained(
        Cause.SWALLOWED_EXCEPTION,
        f"{first.type} was raised{at(first.place)} in step {first.step} on {ranks_text(ranks)} and caught; it cost"
        f" {counted(most, 'batch', 'batches')}, with no step for {'it' if most == 1 else 'them'}{more}",
        ranks=ranks,
        place=first.place,
        seen=Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


@rule(
    RulePhase.SILENT,
    Cause.UNINITIALISED_PARAMETERS,
    outranks=("nan",),
    outranked_by=("unwaited_collective", "batches_given_up"),
)
def uninitialised_parameters(case: Case) -> Explanation | None:
    """Parameters that had a gradient, and held before any step what no program begins with."""
    unset = [
        (rank.rank, one)
        for rank in case.evidence.ranks
        for one in (rank.looks.arrived if rank.looks else ())
        if one.unset
    ]
    if not unset:
        return None
    _, first = unset[0]
    ranks = tuple(sorted({rank for rank, _ in unset}))
    name = first.unset[0]
    more = f" and {counted(len(first.unset) - 1, 'more parameter')}" if len(first.unset) > 1 else ""
    return explained(
        Cause.UNINITIALISED_PARAMETERS,
        f"{name}{more} of {first.model} held {first.unset_value} on {ranks_text(ranks)} before the first step: memory"
        " that was given out and never written, it seems",
        ranks=ranks,
        place=Place(parameter=name, module=name.rpartition(".")[0] or None, layer=layer_of(name)),
        seen=Seen.EFFECT,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )
