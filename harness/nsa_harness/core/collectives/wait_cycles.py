"""Find cycles of ranks that wait for each other in several process groups."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.verdict.components import components

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank that waits in a collective for another rank."""

    rank: int
    event: Event
    waits_for: int
    never_entered: bool  # rank `waits_for` has never entered any collective of the group


def cycle(timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]]) -> tuple[Link, ...]:
    """Return the first cycle of ranks that wait for each other, or an empty tuple if there is none.

    Each rank is in a collective that the next rank has not entered. Such a cycle spans several process groups. Within
    one group it is impossible, because each next rank has entered fewer collectives of the group.
    """
    awaited = _awaited_ranks(timelines, groups)
    edges: dict[_Node, list[_Node]] = {("rank", rank): [] for rank in timelines}
    for rank, (_, absent) in awaited.items():
        # Ranks that wait for the same ranks share one list, which becomes a node of its own between them.
        edges["rank", rank] = [("absent", id(absent))]
        edges["absent", id(absent)] = [("rank", other) for other in absent]
    component = components(edges)
    sizes = Counter(component.values())
    start = min((rank for rank in timelines if sizes[component["rank", rank]] > 1), default=None)
    return () if start is None else _shortest_cycle(start, awaited)


_Node = tuple[str, int]
_Absent = dict[int, int]  # rank that has not entered a collective -> number of its latest collective in the group
_Awaited = Mapping[int, tuple[Event, _Absent]]  # rank that waits -> the collective, and for whom


def _awaited_ranks(timelines: Mapping[int, Timeline], groups: Mapping[str, Sequence[Members]]) -> _Awaited:
    """Return the oldest unfinished collective of each rank that some members have not entered, with these members.

    Ranks that are in the same collective share one dict of members, so the cost does not grow with all pairs of ranks.
    """
    known: dict[tuple[str, int, int], _Absent] = {}  # (group, id of its members, number) -> the absent members
    parties_of = {
        group: {rank: members for members in parties[::-1] for rank in members} for group, parties in groups.items()
    }
    awaited: dict[int, tuple[Event, _Absent]] = {}
    for rank, line in timelines.items():
        for event in line.events:
            members = parties_of.get(event.group, {}).get(rank)
            if event.is_done or event.seq is None or members is None:
                continue
            key = event.group, id(members), event.seq
            if key not in known:
                known[key] = _missing_members(event, members, timelines)
            if known[key]:
                awaited[rank] = event, known[key]
                break
    return awaited


def _missing_members(event: Event, members: Members, timelines: Mapping[int, Timeline]) -> _Absent:
    """Return each group member that has not entered the collective, and the number of its latest collective there."""
    latest = {
        rank: max((other.seq or 0 for other in timelines[rank].of_group(event.group)), default=0)
        for rank in members
        if rank in timelines and timelines[rank].events
    }
    return {rank: seq for rank, seq in latest.items() if seq < (event.seq or 0)}


def _shortest_cycle(start: int, awaited: _Awaited) -> tuple[Link, ...]:
    """Return the shortest cycle of links from rank `start` back to itself, or an empty tuple if there is none."""
    reached_from: dict[int, int] = {}  # rank -> the rank that waits for it, on the shortest path from `start`
    queue, enumerated = deque([start]), set[int]()
    while queue and start not in reached_from:
        rank = queue.popleft()
        _, absent = awaited.get(rank, (None, {}))
        if id(absent) in enumerated:  # each of them was reached on a path that is no longer
            continue
        enumerated.add(id(absent))
        for other in absent:
            if other not in reached_from:
                reached_from[other] = rank
                queue.append(other)
    links: list[Link] = []
    waits_for = start
    while start in reached_from and (not links or waits_for != start):
        rank = reached_from[waits_for]
        event, absent = awaited[rank]
        links.append(Link(rank=rank, event=event, waits_for=waits_for, never_entered=absent[waits_for] == 0))
        waits_for = rank
    return tuple(reversed(links))
