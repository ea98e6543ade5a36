"""What is told of one rank's entry into a collective: number, group, size, line, and the file that proves it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.diagnosed.case import Case, at, collectives_of, place_of
from harness.core.diagnosed.naming import ranks_text
from harness.core.observed.stacks import user_frame
from harness.core.parted.divergence import Entry, elements
from harness.core.parted.unlike import Unlike
from harness.core.place import Place
from harness.core.report import CollectiveRef

_CLASSES = 4  # kinds of behaviour that a sentence names


def entry_text(case: Case, entry: Entry) -> str:
    """All that names it: "all_reduce #13 of group 0 (81 elements) at train.py:30"."""
    one = entry.collective
    of = f" ({sum(elements(one))} elements)" if one.sizes else ""
    return f"{one.op} #{one.seq} of group {one.group}{of}{at(entered_place(case, entry))}"


def entered_text(case: Case, entries: Sequence[Entry]) -> str:
    """Who entered what; ranks that entered the same stand together."""
    told = classes([(entry.rank, entry_text(case, entry)) for entry in entries])
    return ", ".join(f"{ranks} entered {text}" for ranks, text in told)


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


def number_of(case: Case, unlike: Unlike) -> int | None:
    """The number that a recorder gave to one of these calls."""
    calls = [call for _, call in unlike.calls]
    entries = (entry for found in case.analysis.divergences for entry in found.entries)
    return next((entry.collective.seq for entry in entries if entry.call in calls), None)


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
