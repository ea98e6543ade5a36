"""Find cycles of ranks that wait for each other in several process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.timeline import Event, Timeline

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
    links = {rank: _links(line, groups, timelines) for rank, line in sorted(timelines.items())}
    return next((ring for start in links if (ring := _shortest_cycle(start, links))), ())


def _links(
    line: Timeline, groups: Mapping[str, Sequence[Members]], timelines: Mapping[int, Timeline]
) -> tuple[Link, ...]:
    """Return a link to each rank that has not yet entered this rank's oldest unfinished collective."""
    for event in line.events:
        members = next((parties for parties in groups.get(event.group, ()) if line.rank in parties), ())
        absent = [] if event.is_done or event.seq is None else list(_missing_members(event, members, timelines))
        if absent:
            return tuple(
                Link(rank=line.rank, event=event, waits_for=rank, never_entered=latest == 0) for rank, latest in absent
            )
    return ()


def _missing_members(event: Event, members: Members, timelines: Mapping[int, Timeline]) -> Iterator[tuple[int, int]]:
    """Yield each group member that has not entered the collective, and the number of its latest collective there."""
    for rank in members:
        if rank in timelines and timelines[rank].events:
            latest = max((other.seq or 0 for other in timelines[rank].of_group(event.group)), default=0)
            if latest < (event.seq or 0):
                yield rank, latest


def _shortest_cycle(start: int, links: Mapping[int, Sequence[Link]]) -> tuple[Link, ...]:
    """Return the shortest cycle of links from rank `start` back to itself, or an empty tuple if there is none."""
    paths: list[tuple[Link, ...]] = [(link,) for link in links[start]]
    visited: set[int] = set()
    while paths:
        path = paths.pop(0)
        rank = path[-1].waits_for
        if rank == start:
            return path
        if rank not in visited:
            visited.add(rank)
            paths += [(*path, link) for link in links.get(rank, ())]
    return ()
