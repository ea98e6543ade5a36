"""The members of each process group, according to the status files or the calls of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_harness.core.collectives.timeline import Timeline
from nsa_harness.core.evidence.evidence import StatusFile

Members = tuple[int, ...]


def groups_of(
    timelines: Mapping[int, Timeline],
    status_files: Mapping[int, StatusFile],
    known_groups: Mapping[str, Members] | None = None,
) -> dict[str, tuple[Members, ...]]:
    """Map each process group in which a rank called a collective to the ranks in this group.

    The ranks come from the status files, otherwise from `known_groups`. If both lack the group, its members are the
    ranks that entered it; for the default group they are all ranks. If ranks use one name for different groups, the
    result has several tuples for this name.
    """
    with_events: dict[str, list[int]] = {}
    for rank, line in sorted(timelines.items()):
        for group in line.groups:
            with_events.setdefault(group, []).append(rank)
    stored = _stored_groups(status_files)
    members_of: dict[str, tuple[Members, ...]] = {}
    for group in sorted({event.group for line in timelines.values() for event in line.events}):
        known = tuple((known_groups or {}).get(group, ()))
        members_of[group] = tuple(sorted(stored.get(group) or ({known} if known else ()))) or (
            (tuple(sorted(timelines)) if group in _DEFAULT else tuple(with_events.get(group, ())),)
        )
    return members_of


def _stored_groups(status_files: Mapping[int, StatusFile]) -> dict[str, set[Members]]:
    """Return the members of each group as the status files of its members have them.

    Status files that were read with equal texts share one tuple, so each tuple is sorted and compared only once.
    """
    sorted_members: dict[int, tuple[Members, frozenset[int]]] = {}  # by the id of the tuple in the status file
    groups: dict[str, dict[int, Members]] = {}
    for rank, status_file in status_files.items():
        for group, members in status_file.groups.items():
            if id(members) not in sorted_members:
                sorted_members[id(members)] = tuple(sorted(members)), frozenset(members)
            in_order, ranks = sorted_members[id(members)]
            if rank in ranks:
                groups.setdefault(group, {})[id(in_order)] = in_order
    return {group: set(by_id.values()) for group, by_id in groups.items()}


_DEFAULT = ("", "0")
