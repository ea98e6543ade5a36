"""Collectives that ranks call in another order: at the same point of the program, and of what one goes through."""

from __future__ import annotations

from nsa_harness.core.diagnosis.case import Case, Explanation, at, explained, place_of
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import (
    call_proof,
    call_reference,
    classes,
    flight_proof,
    number_text,
    parted,
    undecided,
)
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.diagnosis.progress import in_one_function, parting_frames
from nsa_harness.core.divergence.divergence import Kind
from nsa_harness.core.divergence.mismatch import Unlike
from nsa_harness.core.evidence.evidence import Frame


@rule(
    Phase.RANKS_DIFFER,
    Cause.COLLECTIVE_ORDER_MISMATCH,
    Cause.RANK_CONDITIONAL_COLLECTIVE,
    outranks=("rank0_only_collective",),
)
def collective_order_mismatch(case: Case) -> Explanation | None:
    unlike = case.unlike if parted(case) else None
    if unlike is None or unlike.kind is not Kind.OPERATION:
        return None
    if unlike.left_out:
        return _left_out(case, unlike)
    told = classes([(rank, f"{call.op}{at(call.place)}") for rank, call in unlike.calls])
    calls = ", ".join(f"{ranks} called {text}" for ranks, text in told)
    return explained(
        Cause.COLLECTIVE_ORDER_MISMATCH,
        f"the ranks call different collectives at the same point of step {unlike.step}{number_text(case, unlike)}:"
        f" {calls}{undecided(unlike.differ, unlike.calls)}",
        ranks=unlike.differ,
        place=unlike.call(unlike.differ[0]).place,
        step=unlike.step,
        collective=call_reference(case, unlike, unlike.differ[0]),
        confidence=0.95,
        proof=(*call_proof(case, unlike.differ), *flight_proof(case, unlike.differ)),
        advice="Make every rank call the same collectives in the same order: look for a branch or an iteration over a"
        " set or dict that differs between ranks above the named lines.",
    )


def _left_out(case: Case, unlike: Unlike) -> Explanation:
    """The ranks that kept to their order of the steps before tell which call the others left out."""
    rank, call = next((rank, call) for rank, call in unlike.calls if rank not in unlike.differ)
    instead = unlike.call(unlike.differ[0])
    above = _line_above(case, rank, unlike.differ[0]) if instead.place != call.place else None
    if above is not None:
        return _turned(case, unlike, above)
    return explained(
        Cause.RANK_CONDITIONAL_COLLECTIVE,
        f"{ranks_text(unlike.differ)} skipped {call.op}{at(call.place)} in step {unlike.step}"
        f"{number_text(case, unlike)}, which rank {rank} called, and went on to {instead.op}{at(instead.place)}, which"
        " comes later in other steps;"
        " or it makes both in another order",
        ranks=unlike.differ,
        place=call.place,
        step=unlike.step,
        collective=call_reference(case, unlike, rank),
        confidence=0.8,
        proof=(*call_proof(case, unlike.differ), *flight_proof(case, unlike.differ)),
        advice="Call the collective on every rank. Below FSDP that means: run the same layers on every rank.",
    )


def _turned(case: Case, unlike: Unlike, above: Frame) -> Explanation:
    """Both calls are made from one line: it goes through them one after the other, here in another order."""
    told = classes([(rank, f"{call.op}{at(call.place)}") for rank, call in unlike.calls])
    place = place_of(case, unlike.differ[0], above)
    return explained(
        Cause.COLLECTIVE_ORDER_MISMATCH,
        f"{ranks_text(unlike.differ)} came to another collective first than in its steps before, in step"
        f" {unlike.step}{number_text(case, unlike)}: {', '.join(f'{ranks} called {text}' for ranks, text in told)}, all"
        f" from one line above{at(place)}, so that what it goes through has another order there, or lacks an item",
        ranks=unlike.differ,
        place=place,
        step=unlike.step,
        collective=call_reference(case, unlike, unlike.differ[0]),
        confidence=0.75,
        proof=(*call_proof(case, unlike.differ), *flight_proof(case, unlike.differ)),
        advice="Go through the collectives in an order that is the same on every rank: sort the keys of a dict or the"
        " items of a set before the loop, and let no rank leave an item out.",
    )


def _line_above(case: Case, rank: int, other: int) -> Frame | None:
    """From the outside in, where the stacks are alike up to a line from which they go into different functions."""
    alike, apart = parting_frames(case, rank, other)
    if not alike or apart is None or in_one_function(*apart):
        return None
    return alike[-1]
