"""What is told of the collectives in which ranks part: who entered what, where, and the files that prove it."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import Case, at, collectives_of, ledger_proof, place_of
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.divergence.divergence import Divergence, Entry, elements, minority
from nsa_harness.core.divergence.ledger import StepDifference
from nsa_harness.core.divergence.mismatch import CallMismatch
from nsa_harness.core.evidence.evidence import Board, Ending
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.report import CollectiveRef, Place, Status
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import WaitKind

_FOR_RANKS = frozenset({WaitKind.COLLECTIVE, WaitKind.GONE})
_CLASSES = 4  # kinds of behaviour that a sentence names


def entry_text(case: Case, entry: Entry) -> str:
    """All that names it: "all_reduce #13 of group 0 (81 elements) at train.py:30"."""
    one = entry.collective
    of = f" ({sum(elements(one))} elements)" if one.sizes else ""
    return f"{one.op} #{one.seq} of group {one.group}{of}{at(entered_place(case, entry))}"


def entered_text(case: Case, entries: Sequence[Entry]) -> str:
    """Who entered what; ranks that entered the same stand together."""
    by_text = classes([(entry.rank, entry_text(case, entry)) for entry in entries])
    return ", ".join(f"{ranks} entered {text}" for ranks, text in by_text)


def classes(texts: Sequence[tuple[int, str]]) -> list[tuple[str, str]]:
    """Ranks of the same text as one, those with the lowest rank first; of very many texts the number of the rest."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [(ranks_text(some), text) for text, some in list(ranks.items())[:_CLASSES]]
    rest = sum(map(len, list(ranks.values())[_CLASSES:]))
    return [*shown, (f"{rest} more ranks", "something else")] if rest else shown


def on_ranks(texts: Sequence[tuple[int, str]]) -> str:
    """ "1000 elements on rank 0, 1004 elements on rank 1"."""
    return ", ".join(f"{text} on {ranks}" for ranks, text in classes(texts))


def counts_text(counts: Sequence[tuple[int, int]]) -> str:
    """ "rank 0 x1 · rank 1 x0"."""
    return " · ".join(f"{ranks} {text}" for ranks, text in classes([(rank, f"x{count}") for rank, count in counts]))


def reference(entry: Entry) -> CollectiveRef:
    one = entry.collective
    return CollectiveRef(group=one.group, seq=one.seq, op=one.op)


def first_entries(case: Case) -> tuple[Entry, ...]:
    """Of the group in which the ranks parted first."""
    return case.analysis.divergences[0].entries if case.analysis.divergences else ()


def number_of(case: Case, mismatch: CallMismatch) -> int | None:
    """The number that a recorder gave to one of these calls."""
    calls = [call for _, call in mismatch.calls]
    entries = (entry for found in case.analysis.divergences for entry in found.entries)
    return next((entry.collective.seq for entry in entries if entry.call in calls), None)


def call_reference(case: Case, mismatch: CallMismatch, rank: int) -> CollectiveRef:
    """What this rank called where the calls differ."""
    return CollectiveRef(group=mismatch.group, seq=number_of(case, mismatch), op=mismatch.call(rank).op)


def number_text(case: Case, mismatch: CallMismatch) -> str:
    """Which one of its group it is, behind the name of the operation."""
    seq = number_of(case, mismatch)
    return f" (group {mismatch.group})" if seq is None else f" (#{seq} of group {mismatch.group})"


def entered_place(case: Case, entry: Entry) -> Place | None:
    """The line a collective was entered from: of its call, or for an open one of the frame the rank stands in."""
    if entry.call is not None:
        return entry.call.place
    if entry.collective.retired:
        return None
    graph = case.judgement.proof.graph if case.judgement.proof else None
    wait = next((one for one in graph.waits if one.rank == entry.rank), None) if graph else None
    if wait is not None:
        return place_of(case, entry.rank, wait.user)
    rank = case.rank(entry.rank)
    return place_of(case, entry.rank, user_frame(rank.raised.frames) if rank and rank.raised else None)


def flight_proof(case: Case, ranks: Sequence[int]) -> tuple[str, ...]:
    """The recorders of these ranks, as far as they were read."""
    known = (case.rank(rank) for rank in ranks)
    return tuple(f"rank{rank.rank}/flight.json" for rank in known if rank and collectives_of(case.evidence, rank))


def parted(case: Case) -> bool:
    """The run ended because ranks waited for each other: no rank failed by itself, and every root waits for ranks."""
    first = case.first_failure
    if case.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in case.roots}
    return case.judgement.status is Status.HANG and bool(roots) and roots <= _FOR_RANKS


def undecided(differ: Sequence[int], everyone: Sequence[object]) -> str:
    return "; which of them is wrong the run does not show" if len(differ) == len(everyone) else ""


def entry_of(found: Divergence, rank: int) -> Entry:
    return next((entry for entry in found.entries if entry.rank == rank), found.entries[0])


def shown_later(case: Case) -> str:
    """Where it came to light, which is later."""
    entries = first_entries(case)
    return f"; it showed when {entered_text(case, entries)}" if entries else ""


def pending_place(case: Case, ranks: Sequence[int]) -> Place | None:
    places = [entered_place(case, entry) for entry in first_entries(case) if entry.rank in ranks]
    return next((place for place in places if place), None)


def backward_place(case: Case) -> Place | None:
    """The line of the backward pass in which some rank still reduces; what a rank calls after training is not it."""
    below = [entry for entry in first_entries(case) if entry.call is None]
    return next((place for entry in below if (place := entered_place(case, entry))), None)


def call_proof(case: Case, ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(path for rank in ranks for path in ledger_proof(case, rank))


def apart(found: StepDifference) -> tuple[int, ...]:
    """Who differs from the most; between equally many, who entered fewer."""
    apart = minority(dict(found.counts))
    return apart if len(apart) < len(found.counts) else found.behind


def added_between_steps(case: Case, found: Divergence) -> int | None:
    """The one rank that entered something new after its step, where all others are in the next step already."""
    ranks = case.added_in(found)
    if len(ranks) != 1 or not between_steps(case.boards.get(ranks[0])):
        return None
    others = [entry.rank for entry in found.entries if entry.rank not in ranks]
    return None if any(between_steps(case.boards.get(rank)) for rank in others) else ranks[0]


def between_steps(board: Board | None) -> bool:
    return board is not None and board.training is not None and board.training.kind == "step"
