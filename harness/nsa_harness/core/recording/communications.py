"""Compare the communication of ranks: which operations correspond, and which have no counterpart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from nsa_harness.core.recording.recording import Communication
from nsa_harness.core.recording.trace import Trace

# Operations whose input may have another shape on each rank.
_UNEVEN = ("object", "all_to_all", "scatter", "gather_v", "send", "recv")
_NOT_COLLECTIVE = ("no_sync", "step")

Key = tuple[object, ...]


def is_point_to_point(communication: Communication) -> bool:
    return communication.peer is not None or any(word in communication.operation for word in ("send", "recv"))


def key_of(communication: Communication) -> Key:
    """Return what must be equal on all ranks that take part in a collective."""
    shape: Key = ()
    if not any(word in communication.operation for word in _UNEVEN):
        shape = (communication.shape, communication.dtype)
    return communication.operation, communication.ranks, communication.root, *shape


def paired(traces: Sequence[Trace]) -> set[int]:
    """Return the id() of each point-to-point operation that has its counterpart on the other rank.

    The n-th message to a rank with a tag belongs to the n-th receive from this rank with this tag.
    """
    sent: defaultdict[tuple[int | None, int | None, int], list[Communication]] = defaultdict(list)
    received: defaultdict[tuple[int | None, int | None, int], list[Communication]] = defaultdict(list)
    for trace in traces:
        for communication in sorted(trace.communications, key=lambda communication: communication.order):
            if not is_point_to_point(communication):
                continue
            if "recv" in communication.operation:
                received[communication.peer, trace.rank, communication.tag or 0].append(communication)
            else:
                sent[trace.rank, communication.peer, communication.tag or 0].append(communication)
    found = set()
    for route, messages in sent.items():
        for message, receive in zip(messages, received.get(route, ()), strict=False):
            found |= {id(message), id(receive)}
    return found


def difference(
    left: Iterable[Communication], right: Iterable[Communication], ranks: tuple[int, int], pairs: set[int]
) -> tuple[Communication | None, Communication | None] | None:
    """Return the first operations in which two ranks differ, or None if both do the same.

    Groups without one of the ranks are left out, and so is each point-to-point operation that has its counterpart.
    """
    first, second = (_shared(communications, ranks, pairs) for communications in (left, right))
    for index in range(max(len(first), len(second))):
        ours = first[index] if index < len(first) else None
        theirs = second[index] if index < len(second) else None
        if ours is None or theirs is None or is_point_to_point(ours) or is_point_to_point(theirs):
            return ours, theirs
        if key_of(ours) != key_of(theirs):
            return ours, theirs
    return None


def _shared(communications: Iterable[Communication], ranks: tuple[int, int], pairs: set[int]) -> list[Communication]:
    return [
        communication
        for communication in communications
        if communication.operation not in _NOT_COLLECTIVE
        and (
            id(communication) not in pairs
            if is_point_to_point(communication)
            else not communication.ranks or set(ranks) <= set(communication.ranks)
        )
    ]
