"""Why a transfer between two ranks does not come about: who left its half out, or had another partner before."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.alignment.transfers import Departure, first_departure, other_partner
from nsa_harness.core.diagnosis.case import Case, Explanation, at, dump_proof, explained, hung_roots, wait_place
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.diagnosis.rules.group_waits import stuck_sockets
from nsa_harness.core.evidence.evidence import Board, Call
from nsa_harness.core.verdict.group_waits import TRANSFERS, operation
from nsa_harness.core.verdict.wait import Wait, WaitKind


@rule(RulePhase.WAIT_CYCLE, Cause.P2P_UNMATCHED, outranks=("store_key_missing",))
def p2p_unmatched(case: Case) -> Explanation | None:
    roots = [root for root in hung_roots(case) if root.kind is WaitKind.POINT_TO_POINT and root.closed]
    if any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(case)):
        return None
    if not roots:
        return _past_each_other(case)
    if case.difference is not None and any(root.kind is WaitKind.COLLECTIVE for root in hung_roots(case)):
        return None  # a rank passed over a collective: that it then waits for its partner follows from it
    waits = [f"rank {root.rank} waits in {_transfer(root)}{at(wait_place(case, root))}" for root in roots[:2]]
    waits += [
        f"rank {root.rank} stands in {root.stands_in}{at(wait_place(case, root))}"
        for root in hung_roots(case)
        if root.kind is not WaitKind.POINT_TO_POINT
    ][:2]
    more = f"; so do {len(roots) - 2} more" if len(roots) > 2 else ""
    departed = _departed(case, roots)
    ranks = (departed[0],) if departed else tuple(sorted(root.rank for root in roots))
    why = f"; rank {departed[0]} {departed[2]}" if departed else ""
    return explained(
        Cause.P2P_UNMATCHED,
        f"no rank makes the other half of a transfer: {', and '.join(waits)}{more}{why}",
        ranks=ranks,
        place=departed[1].place if departed else wait_place(case, roots[0]),
        step=_step_of_departure(case),
        parties=_parties(case),
        confidence=0.9 if departed or _in_transfers(roots) else 0.8,
        proof=dump_proof(case, roots[0]),
        advice="Pair each recv with a send of the partner, in the same order on both. Where both sides begin with the"
        " same half, let one of them begin with the other, or use batch_isend_irecv.",
    )


def _past_each_other(case: Case) -> Explanation | None:
    """Both halves are there, the network has nothing left to deliver, and still neither ends."""
    roots = [root for root in hung_roots(case) if root.kind is WaitKind.TRANSPORT and _in_transfer(root)]
    if not roots or any(stuck_sockets(case.evidence)):
        return None
    both = ", and ".join(
        f"rank {root.rank} stands in {root.stands_in}{at(wait_place(case, root))}" for root in roots[:2]
    )
    return explained(
        Cause.P2P_UNMATCHED,
        f"{both}; nothing is under way between them: these are no two halves of one transfer",
        ranks=tuple(sorted(root.rank for root in roots)),
        place=wait_place(case, roots[0]),
        step=_step_of_departure(case),
        parties=_parties(case),
        confidence=0.75,
        proof=dump_proof(case, roots[0]),
        advice="Compare tag, group and order of both sides: a receive with another tag waits for another message.",
    )


def _in_transfer(root: Wait) -> bool:
    return root.call is not None and operation(root.call) in TRANSFERS


def _departed(case: Case, roots: Sequence[Wait]) -> tuple[int, Call, str] | None:
    """The one rank, of those that wait and those waited for, that did not do as in its rounds before."""
    left_out = [
        (rank, one.due, f"left out {one.due.op}{at(one.due.place)} in its round")
        for rank, one in departures(case, roots).items()
    ]
    turned = [
        (rank, one, f"had another partner each time before in {one.op}{at(one.place)}")
        for rank, board in _boards_of(case, roots).items()
        if (one := other_partner(board))
    ]
    return next((found[0] for found in (left_out, turned) if len(found) == 1), None)


def departures(case: Case, roots: Sequence[Wait]) -> dict[int, Departure]:
    """Of the ranks that wait and those waited for, where each left its order."""
    found = ((rank, first_departure(board)) for rank, board in _boards_of(case, roots).items())
    return {rank: one for rank, one in found if one is not None}


def _step_of_departure(case: Case) -> int | None:
    """Of a transfer that one rank left out: the step of its last call in order, if that was not between two steps."""
    left_out = departures(case, [root for root in hung_roots(case) if root.kind is WaitKind.POINT_TO_POINT])
    if len(left_out) != 1:
        return None
    ((rank, found),) = left_out.items()
    done_s = dict(case.boards[rank].steps_s).get(found.after.step)
    return None if done_s is not None and done_s <= found.after.entered_s else found.after.step


def _parties(case: Case) -> tuple[int, ...]:
    """Who waits in a transfer, and for whom."""
    waiting = [root for root in case.roots if root.kind in (WaitKind.POINT_TO_POINT, WaitKind.TRANSPORT)]
    return tuple(sorted({rank for root in waiting for rank in (root.rank, *root.peers)}))


def _boards_of(case: Case, roots: Sequence[Wait]) -> dict[int, Board]:
    concerned = {rank for root in roots for rank in (root.rank, *root.peers)}
    return {rank: board for rank, board in case.boards.items() if rank in concerned}


def _in_transfers(roots: Sequence[Wait]) -> bool:
    """All whom they wait for stand in a transfer too: each side is wrong by itself, and not by what it left out."""
    return {peer for root in roots for peer in root.peers} <= {root.rank for root in roots}


def _transfer(root: Wait) -> str:
    call = root.call
    if call is None:
        return root.stands_in
    half = "to" if "send" in operation(call) else "from"
    return f"{call.op} {half} {ranks_text(root.peers)}"
