"""Transfers between two ranks: who turned to another partner."""

from __future__ import annotations

from nsa_harness import protocol
from nsa_harness.core.alignment.routine import KEPT
from nsa_harness.core.evidence.evidence import Board, Call


def other_partner(board: Board) -> Call | None:
    """The newest transfer, where its line has had one and the same partner each time before, and now another."""
    made = [one for one in board.calls if not one.op.startswith(protocol.WAIT) and one.peer is not None]
    if not made:
        return None
    newest = made[-1]
    usual = [one.peer for one in made[:-1] if (one.op, one.group, one.place) == (newest.op, newest.group, newest.place)]
    return newest if len(usual) >= KEPT and len(set(usual)) == 1 and usual[0] != newest.peer else None
