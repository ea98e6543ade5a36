"""Why ranks wait for each other: rules over what they entered unlike, from recorders, calls and step ledgers.

None of them answers where something else explains the run: a rank that failed by itself, or that waits for no rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.diagnosed.case import (
    Case,
    at,
    finding,
    ledger_proof,
)
from harness.core.diagnosed.entries import (
    classes,
    counts_text,
    entered_place,
    entered_text,
    entry_text,
    first_entries,
    flight_proof,
    number_of,
    on_ranks,
)
from harness.core.diagnosed.naming import ranks_text
from harness.core.judged.verdict import FailureKind
from harness.core.judged.wait import WaitKind
from harness.core.observed.evidence import Ending
from harness.core.parted.divergence import Divergence, Entry, Kind, Link, elements, minority
from harness.core.parted.ledger import StepDifference
from harness.core.parted.unlike import Unlike
from harness.core.place import Place
from harness.core.report import Finding, Status

_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"})
_LINKS = 4  # of a cycle, that a sentence names
_FOR_RANKS = frozenset({WaitKind.COLLECTIVE, WaitKind.GONE})


def cross_group_deadlock(case: Case) -> Finding | None:
    cycle = case.analysis.cycle if _parted(case) else ()
    if not cycle or (case.skipped is not None and not _one_point([link.entry for link in cycle])):
        return None
    links = [_link_text(case, link) for link in cycle]
    ranks = tuple(sorted(link.entry.rank for link in cycle))
    step = f" in step {cycle[0].entry.call.step}" if cycle[0].entry.call else ""
    return finding(
        "cross_group_deadlock",
        f"{len(ranks)} ranks wait for each other in different groups{step}:"
        f" {', '.join(links[:_LINKS])}{f' and {len(links) - _LINKS} more' if len(links) > _LINKS else ''}",
        ranks=ranks,
        place=entered_place(case, cycle[0].entry),
        confidence=0.95,
        proof=flight_proof(case, ranks),
        advice="Enter the collectives of these groups in the same order on every rank. Where the order depends on data,"
        " do the work of one group to its end before any rank begins the other's.",
    )


def no_sync_mismatch(case: Case) -> Finding | None:
    """A step in which some rank reduced less than the others, with its gradients there."""
    found = case.step_difference if _parted(case) else None
    if found is None or found.called or found.op not in _REDUCTIONS or not found.alone or found.without_gradients:
        return None
    ranks = _apart(found)
    return finding(
        "no_sync_mismatch",
        f"{ranks_text(ranks)} reduced gradients otherwise than the rest in step {found.step} ({found.op} of group"
        f" {found.group}: {counts_text(found.counts)}); from there on reductions of different steps were paired"
        f"{_shown(case)}",
        ranks=ranks,
        place=_pending_place(case, ranks),
        confidence=0.95,
        proof=("step_ledger.txt",),
        advice="Enter no_sync, and leave it, in the same steps on every rank. The gradients are wrong from that step"
        " on: do not go on from a checkpoint written after it.",
    )


def uneven_inputs(case: Case) -> Finding | None:
    finished = case.finished if _parted(case) else None
    difference = case.step_difference
    if finished is None or (difference is not None and difference.step <= finished.step):
        return None
    instead = [f"{call.op}{at(call.place)}" for _, call in finished.calls[:1]]
    place = finished.calls[0][1].place if finished.calls else None
    waiting = entered_text(case, [entry for entry in first_entries(case) if entry.rank in finished.others])
    return finding(
        "uneven_inputs",
        f"{ranks_text(finished.ranks)} ran out of batches after step {finished.step}"
        f"{f' and entered {instead[0]}' if instead else ' and ended'}; {ranks_text(finished.others)} went on to step"
        f" {finished.step + 1}{f': {waiting}' if waiting else ''}",
        ranks=finished.ranks,
        place=place,
        confidence=0.9,
        proof=("step_ledger.txt", *_call_proof(case, finished.ranks)),
        advice="Give every rank the same number of batches: a DistributedSampler that pads, drop_last=True, or the"
        " context torch.distributed.algorithms.Join. If the data is even, look for a swallowed exception or a break.",
    )


def shape_mismatch(case: Case) -> Finding | None:
    return _mismatch(case, Kind.SHAPE)


def dtype_mismatch(case: Case) -> Finding | None:
    return _mismatch(case, Kind.DTYPE)


def collective_order_mismatch(case: Case) -> Finding | None:
    unlike = case.unlike if _parted(case) else None
    if unlike is None or unlike.kind is not Kind.OPERATION:
        return None
    if unlike.left_out:
        return _left_out(case, unlike)
    told = classes([(rank, f"{call.op}{at(call.place)}") for rank, call in unlike.calls])
    calls = ", ".join(f"{ranks} called {text}" for ranks, text in told)
    return finding(
        "collective_order_mismatch",
        f"the ranks call different collectives at the same point of step {unlike.step}{_number(case, unlike)}:"
        f" {calls}{_undecided(unlike.differ, unlike.calls)}",
        ranks=unlike.differ,
        place=unlike.call(unlike.differ[0]).place,
        confidence=0.95,
        proof=(*_call_proof(case, unlike.differ), *flight_proof(case, unlike.differ)),
        advice="Make every rank call the same collectives in the same order: look for a branch or an iteration over a"
        " set or dict that differs between ranks above the named lines.",
    )


def unseen_collective(case: Case) -> Finding | None:
    """The same as a skipped call, for collectives that are not called from Python: DDP's buckets, FSDP."""
    if not _parted(case):
        return None
    if case.step_difference is not None:
        return _fewer_in_step(case, case.step_difference)
    found = next((one for one in case.analysis.divergences if one.kind is not Kind.MISSING), None)
    if found is None:
        return None
    return finding(
        "rank_conditional_collective",
        f"the ranks parted at collective #{found.seq} of group {found.group}: {entered_text(case, found.entries)}"
        f"{_undecided(found.differ, found.entries)}",
        ranks=found.differ,
        place=entered_place(case, _entry_of(found, found.differ[0])),
        confidence=0.9 if len(found.differ) < len(found.entries) else 0.8,
        proof=flight_proof(case, found.differ),
        advice="One of them left out, or added, a collective that the others did not: look for a branch on the rank or"
        " on its data above the named lines. Collectives without a line of their own belong to DDP or FSDP.",
    )


def _parted(case: Case) -> bool:
    """The run ended because ranks waited for each other: no rank failed by itself, and every root waits for ranks."""
    first = case.first_failure
    if case.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in case.roots}
    return case.judgement.status is Status.HANG and bool(roots) and roots <= _FOR_RANKS


def _left_out(case: Case, unlike: Unlike) -> Finding:
    """The ranks that kept to their order of the steps before tell which call the others left out."""
    rank, call = next((rank, call) for rank, call in unlike.calls if rank not in unlike.differ)
    instead = unlike.call(unlike.differ[0])
    return finding(
        "rank_conditional_collective",
        f"{ranks_text(unlike.differ)} skipped {call.op}{at(call.place)} in step {unlike.step}{_number(case, unlike)},"
        f" which rank {rank} called, and went on to {instead.op}{at(instead.place)}, which comes later in other steps",
        ranks=unlike.differ,
        place=call.place,
        confidence=0.95,
        proof=(*_call_proof(case, unlike.differ), *flight_proof(case, unlike.differ)),
        advice="Call the collective on every rank. Below FSDP that means: run the same layers on every rank.",
    )


def _mismatch(case: Case, kind: Kind) -> Finding | None:
    if not _parted(case):
        return None
    unlike = case.unlike
    if unlike is not None and unlike.kind is kind:
        return _unlike_sizes(case, unlike)
    found = case.analysis.divergences[0] if case.analysis.divergences else None
    below = found is not None and found.kind is kind and not any(entry.call for entry in found.entries)
    return _unlike_below(case, found) if found is not None and below and case.skipped is None else None


def _unlike_sizes(case: Case, unlike: Unlike) -> Finding:
    first = unlike.calls[0][1]
    sizes = [
        (rank, f"{_payload(unlike.kind, call.elements, call.dtype)}{at(call.place)}") for rank, call in unlike.calls
    ]
    return finding(
        "shape_mismatch" if unlike.kind is Kind.SHAPE else "dtype_mismatch",
        f"{first.op}{_number(case, unlike)} in step {unlike.step} has {on_ranks(sizes)}"
        f"{_undecided(unlike.differ, unlike.calls)}",
        ranks=unlike.differ,
        place=unlike.call(unlike.differ[0]).place,
        confidence=0.95,
        proof=_call_proof(case, [rank for rank, _ in unlike.calls]),
        advice=_SIZE_ADVICE,
    )


def _unlike_below(case: Case, found: Divergence) -> Finding:
    sizes = [(entry.rank, _entry_payload(case, found.kind, entry)) for entry in found.entries]
    return finding(
        "shape_mismatch" if found.kind is Kind.SHAPE else "dtype_mismatch",
        f"{found.entries[0].collective.op} #{found.seq} of group {found.group}, below DDP or FSDP, has"
        f" {on_ranks(sizes)}{_undecided(found.differ, found.entries)}",
        ranks=found.differ,
        place=entered_place(case, _entry_of(found, found.differ[0])),
        confidence=0.9,
        proof=flight_proof(case, found.differ),
        advice=_SIZE_ADVICE,
    )


_SIZE_ADVICE = (
    "Pad or gather the sizes first, so that every rank passes the same shape and dtype. gloo ends the rank that"
    " receives too much, which is the victim; NCCL may go on with wrong numbers."
)


def _fewer_in_step(case: Case, found: StepDifference) -> Finding:
    ranks = _apart(found)
    why = ": fewer gradients there than on the others" if found.without_gradients else ""
    return finding(
        "rank_conditional_collective",
        f"{ranks_text(ranks)} entered {found.op} of group {found.group} in step {found.step} otherwise than the rest"
        f" ({counts_text(found.counts)}){why}{_shown(case)}",
        ranks=ranks,
        place=_pending_place(case, ranks),
        confidence=0.9,
        proof=("step_ledger.txt", *flight_proof(case, ranks)),
        advice="Run the same forward and backward on every rank: look for a branch on the rank or its data, or for an"
        " exception that was caught, in the named step.",
    )


def _apart(found: StepDifference) -> tuple[int, ...]:
    """Who differs from the most; between equally many, who entered fewer."""
    apart = minority(dict(found.counts))
    return apart if len(apart) < len(found.counts) else found.behind


def _one_point(entries: Sequence[Entry]) -> bool:
    """Every entry was called from Python at the same point of the same step: none has passed another's."""
    points = {(entry.call.step, entry.call.position) if entry.call else None for entry in entries}
    return len(points) == 1 and None not in points


def _entry_of(found: Divergence, rank: int) -> Entry:
    return next((entry for entry in found.entries if entry.rank == rank), found.entries[0])


def _number(case: Case, unlike: Unlike) -> str:
    seq = number_of(case, unlike)
    return f" (group {unlike.group})" if seq is None else f" (#{seq} of group {unlike.group})"


def _undecided(differ: Sequence[int], everyone: Sequence[object]) -> str:
    return "; which of them is wrong the run does not show" if len(differ) == len(everyone) else ""


def _payload(kind: Kind, count: int, dtype: str) -> str:
    return dtype if kind is Kind.DTYPE else f"{count} elements"


def _entry_payload(case: Case, kind: Kind, entry: Entry) -> str:
    one = entry.collective
    return f"{_payload(kind, sum(elements(one)), '/'.join(one.dtypes))}{at(entered_place(case, entry))}"


def _link_text(case: Case, link: Link) -> str:
    never = any(
        group == link.entry.collective.group and link.waits_for in ranks for group, ranks in case.analysis.never_entered
    )
    who = f"rank {link.waits_for}{', which never entered that group' if never else ''}"
    return f"rank {link.entry.rank} waits in {entry_text(case, link.entry)} for {who}"


def _shown(case: Case) -> str:
    """Where it came to light, which is later."""
    entries = first_entries(case)
    return f"; it showed when {entered_text(case, entries)}" if entries else ""


def _pending_place(case: Case, ranks: Sequence[int]) -> Place | None:
    places = [entered_place(case, entry) for entry in first_entries(case) if entry.rank in ranks]
    return next((place for place in places if place), None)


def _call_proof(case: Case, ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(path for rank in ranks for path in ledger_proof(case, rank))
