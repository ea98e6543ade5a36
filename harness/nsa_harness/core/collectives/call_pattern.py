"""What a rank does again and again: what came next wherever it stood as it stands, and with whom it transfers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Call, StatusFile

KEPT = 2  # times that it was done before, from which on it is a routine


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the rank's own history says of its next event."""

    at: int  # where it stood alike for the longest way back; what follows there is due
    times: int  # that the same followed the event before

    @property
    def kept(self) -> bool:
        return self.times >= KEPT


@lru_cache(maxsize=4096)  # in a large world most ranks did the same
def due(sites: tuple[Hashable, ...], at: int) -> Due | None:
    """What is due at `at`; None where the rank never stood there, or went on in different ways from alike pasts."""
    alike = {here: _alike(sites, here, at) for here in range(1, at) if sites[here - 1] == sites[at - 1]}
    if not alike:
        return None
    longest = max(alike.values())
    best = [here for here, length in alike.items() if length == longest]
    if len({sites[here] for here in best}) > 1:
        return None
    return Due(at=best[-1], times=sum(sites[here] == sites[best[-1]] for here in alike))


def comes_later(sites: Sequence[Hashable], found: Due, at: int, site: Hashable) -> bool:
    """In the round before, `site` came behind what is due."""
    return site in sites[found.at + 1 : at]


def leaves_a_loop(sites: Sequence[Hashable], at: int) -> bool:
    """It went on from the same event to the same one before: a round less is a whole round."""
    return any(sites[here - 1] == sites[at - 1] and sites[here] == sites[at] for here in range(1, at))


def _alike(sites: Sequence[Hashable], here: int, at: int) -> int:
    """How far back the two pasts are equal."""
    length = 0
    while length < here and sites[here - 1 - length] == sites[at - 1 - length]:
        length += 1
    return length


def other_partner(board: StatusFile) -> Call | None:
    """The newest transfer, where its line has had one and the same partner each time before, and now another."""
    made = [one for one in board.calls if not one.op.startswith(protocol.WAIT) and one.peer is not None]
    if not made:
        return None
    newest = made[-1]
    usual = [one.peer for one in made[:-1] if (one.op, one.group, one.place) == (newest.op, newest.group, newest.place)]
    return newest if len(usual) >= KEPT and len(set(usual)) == 1 and usual[0] != newest.peer else None
