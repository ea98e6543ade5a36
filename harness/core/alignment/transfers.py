"""Transfers between two ranks: who left its half out of a round, or turned to another partner."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from nsa_harness import protocol
from nsa_harness.core.alignment.routine import KEPT, due
from nsa_harness.core.evidence.evidence import Board, Call
from nsa_harness.core.verdict.group_waits import TRANSFERS


@dataclass(frozen=True, kw_only=True)
class Departure:
    """`due` was left out behind `after`, the last call that the rank made in its usual order."""

    due: Call  # as it was made in an earlier round
    after: Call


def first_departure(board: Board) -> Departure | None:
    """The transfer that was due where the rank first went on to what comes later in its rounds; None = it kept to them.

    Calls from Python only. A call that it never made before is the end of a loop, no departure.
    """
    calls = _calls(board)
    made = [_site(one) for one in calls]
    for number in range(1, len(made)):
        usual = due(tuple(made[:number]), number)
        if usual is None or calls[usual.at].op not in TRANSFERS:
            continue
        if made[usual.at] != made[number] and made[number] in made[usual.at + 1 : number]:
            return Departure(due=calls[usual.at], after=calls[number - 1])
    return None


def other_partner(board: Board) -> Call | None:
    """The newest transfer, where its line has had one and the same partner each time before, and now another."""
    made = [one for one in _calls(board) if one.peer is not None]
    if not made:
        return None
    newest = made[-1]
    usual = [one.peer for one in made[:-1] if (one.op, one.group, one.place) == (newest.op, newest.group, newest.place)]
    return newest if len(usual) >= KEPT and len(set(usual)) == 1 and usual[0] != newest.peer else None


def _calls(board: Board) -> list[Call]:
    return [one for one in board.calls if not one.op.startswith(protocol.WAIT)]


def _site(one: Call) -> Hashable:
    return one.op, one.group, one.place, one.peer
