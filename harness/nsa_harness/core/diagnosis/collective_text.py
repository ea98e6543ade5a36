"""What is told of the collectives in which ranks part: who entered what, where, and the files that prove it."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.collectives.alignment import Difference, minority
from nsa_harness.core.collectives.reasons import StepDifference
from nsa_harness.core.collectives.timeline import UNTOLD_GROUP, Event
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    collectives_of,
    place_of,
    wait_place,
)
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.report import CollectiveRef, Place, Status
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import WaitKind

_FOR_RANKS = frozenset({WaitKind.COLLECTIVE, WaitKind.GONE})
_CLASSES = 4  # kinds of behaviour that a sentence names


def event_text(context: DiagnosisContext, rank: int, event: Event) -> str:
    """ "all_reduce #13 of group tp at train.py:30"."""
    return f"{event.op}{number_text(event)}{at(event_place(context, rank, event))}"


def number_text(event: Event) -> str:
    """Which one of its group it is, behind the name of the operation.

    The group of all ranks is not named, nor one that a stack alone shows.
    """
    of_group = "" if event.group in ("", "0", UNTOLD_GROUP) else f" of group {event.group}"
    return f"{'' if event.seq is None else f' #{event.seq}'}{of_group}"


def entered_text(context: DiagnosisContext, found: Difference, ranks: Sequence[int] | None = None) -> str:
    """Who entered what; ranks that entered the same stand together."""
    entries = [(rank, event) for rank, event in found.entered if ranks is None or rank in ranks]
    by_text = classes([(rank, event_text(context, rank, event)) for rank, event in entries])
    return ", ".join(f"{some} called {text}" for some, text in by_text)


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


def reference(event: Event) -> CollectiveRef | None:
    """None where only its stack is known."""
    return None if event.group == UNTOLD_GROUP else CollectiveRef(group=event.group, seq=event.seq, op=event.op)


def event_place(context: DiagnosisContext, rank: int, event: Event) -> Place | None:
    """The line a collective was entered from: of its call, or for an open one of the frame the rank stands in."""
    if event.called:
        return event.place
    if event.done:
        return None
    if rank in context.waits:
        return wait_place(context, context.waits[rank])
    known = context.rank(rank)
    return place_of(context, rank, user_frame(known.raised.frames) if known and known.raised else None)


def flight_proof(context: DiagnosisContext, ranks: Sequence[int]) -> tuple[str, ...]:
    """The recorders of these ranks, as far as they were read."""
    known = (context.rank(rank) for rank in ranks)
    return tuple(f"rank{rank.rank}/flight.json" for rank in known if rank and collectives_of(context.evidence, rank))


def parted(context: DiagnosisContext) -> bool:
    """The run ended because ranks waited for each other: no rank failed by itself, and every root waits for ranks."""
    first = context.first_failure
    if context.evidence.ending is Ending.DEADLINE:
        return False
    if first is not None:
        return first.collateral or first.kind is FailureKind.LEFT
    roots = {root.kind for root in context.roots}
    return context.judgement.status is Status.HANG and bool(roots) and roots <= _FOR_RANKS


def unseen(group: str, lost: Sequence[int], *, diverged_before_history: bool) -> tuple[str, ...]:
    """Why what is seen of the group may not be where its ranks parted; empty = nothing speaks for that."""
    of_group = f"group {group or '0'}"
    if diverged_before_history:
        return (f"their calls of {of_group} diverged before the oldest ones that are kept",)
    if lost:
        return (f"the flight recorder of {ranks_text(lost)} lacks numbers of {of_group}",)
    return ()


def apart(found: StepDifference) -> tuple[int, ...]:
    """Who differs from the most; between equally many, who entered fewer."""
    fewer = minority(dict(found.counts))
    return fewer if len(fewer) < len(found.counts) else found.behind
