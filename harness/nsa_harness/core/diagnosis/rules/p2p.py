"""Rules about transfers between two ranks that do not complete: a skipped half, or a changed partner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.alignment import departure, last_transfer_of_loop
from nsa_harness.core.collectives.call_history import other_partner
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import branch_that_skipped_call, rank_that_skipped_wait
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    hung_roots,
    own_frames,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation
from nsa_harness.core.diagnosis.rules.group_waits import stuck_sockets
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.value_origin import origin_of_arguments, origin_of_loop
from nsa_harness.core.verdict.group_waits import TRANSFERS, operation
from nsa_harness.core.verdict.wait import Wait, WaitKind


def p2p_unmatched(context: DiagnosisContext) -> Explanation | None:
    """A rank waits in a send or receive whose other half no rank calls."""
    roots = [root for root in hung_roots(context) if root.kind is WaitKind.POINT_TO_POINT and root.closed]
    if any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context)):
        return None
    if not roots:
        return _unmatched_halves(context)
    if context.difference is not None and any(root.kind is WaitKind.COLLECTIVE for root in hung_roots(context)):
        return None  # a rank skipped a collective, and its wait for a partner follows from that
    others = [root for root in hung_roots(context) if root.kind is not WaitKind.POINT_TO_POINT]
    departed = _departed(context, roots)
    place = departed.place if departed else _origin_of_mismatch(context, roots)
    has_step = departed is not None and departed.step is not None
    return Explanation(
        cause=Cause.P2P_UNMATCHED,
        evidence=EvidenceKind.CLOSED if has_step or _all_peers_wait(roots) else EvidenceKind.PART,
        facts={
            "variant": "half is missing",
            "waits": [_wait_facts(context, root) for root in (*roots[:2], *others[:2])],
            "more_waits": max(len(roots) - 2, 0),
            "departed": departed.facts if departed else None,
        },
        ranks=(departed.rank,) if departed else tuple(sorted(root.rank for root in roots)),
        place=place or wait_place(context, roots[0]),
        step=departed.step if departed else None,
        parties=_parties(context),
        proof=dump_proof(context, roots[0]),
    )


def _unmatched_halves(context: DiagnosisContext) -> Explanation | None:
    """Both ranks called a half and the network has delivered everything, but the halves do not match."""
    roots = [root for root in hung_roots(context) if root.kind is WaitKind.TRANSPORT]
    roots = [root for root in roots if root.call is not None and operation(root.call) in TRANSFERS]
    if not roots or any(stuck_sockets(context.evidence)):
        return None
    return Explanation(
        cause=Cause.P2P_UNMATCHED,
        evidence=EvidenceKind.OPEN,
        facts={
            "variant": "halves do not match",
            "waits": [{**_wait_facts(context, root), "transfer": None} for root in roots[:2]],
        },
        ranks=tuple(sorted(root.rank for root in roots)),
        place=_origin_of_mismatch(context, roots) or wait_place(context, roots[0]),
        parties=_parties(context),
        proof=dump_proof(context, roots[0]),
    )


def _wait_facts(context: DiagnosisContext, root: Wait) -> Facts:
    """Return the facts about a rank's wait. For an unmatched transfer they name its half and its partners."""
    call = root.call if root.kind is WaitKind.POINT_TO_POINT else None
    half: Facts | None = {"op": call.op, "sends": "send" in operation(call), "peers": root.peers} if call else None
    return {"rank": root.rank, "blocked_in": root.blocked_in, "transfer": half, "line": wait_place(context, root)}


@dataclass(frozen=True, kw_only=True)
class _Departed:
    """The only rank among the awaited ones that broke the pattern of its earlier iterations."""

    rank: int
    place: Place | None
    step: int | None
    facts: Facts  # what it did


def _departed(context: DiagnosisContext, roots: Sequence[Wait]) -> _Departed | None:
    """Return the rank that left its rounds, skipped a transfer, changed its partner or skipped the others' wait."""
    concerned = sorted({rank for root in roots for rank in (root.rank, *root.peers)})
    lines = {rank: context.timelines[rank] for rank in concerned if rank in context.timelines}
    awaited = {rank: line for rank, line in lines.items() if any(rank in root.peers for root in roots)}
    gone = {rank: event for rank, line in awaited.items() if (event := last_transfer_of_loop(line))}
    if len(gone) == 1:
        ((rank, last),) = gone.items()
        facts: Facts = {"did": "left its rounds", "op": last.op, "line": last.place}
        return _Departed(rank=rank, place=_exit(context, last.place), step=last.step, facts=facts)
    left = {rank: departed for rank, line in awaited.items() if (departed := departure(line))}
    left = {rank: departed for rank, departed in left.items() if departed.expected.transfer}
    if len(left) == 1:
        ((rank, broken),) = left.items()
        path = tuple(reversed(broken.expected.chain))
        off = branch_that_skipped_call(context, rank, path, own=True) if path else None
        place = off or _decided_at(context, broken.expected.place)
        facts = {"did": "skipped", "op": broken.expected.op, "line": broken.expected.place}
        return _Departed(rank=rank, place=place, step=broken.made.step, facts=facts)
    turned = {rank: call for rank in lines if rank in context.boards and (call := other_partner(context.boards[rank]))}
    if len(turned) == 1:
        ((rank, call),) = turned.items()
        facts = {"did": "took another peer", "op": call.op, "line": call.place}
        return _Departed(rank=rank, place=call.place, step=call.step, facts=facts)
    return None if gone or left or turned else _skipped_wait(context, roots)


def _skipped_wait(context: DiagnosisContext, roots: Sequence[Wait]) -> _Departed | None:
    rank = rank_that_skipped_wait(context, [root.rank for root in roots])
    if rank is None:
        return None
    waiting = next(root.rank for root in roots if rank in root.peers)
    made = _transfers(context, rank, waiting) or _transfers(context, waiting, rank)
    path = tuple(reversed(made[-1].chain)) if made else own_frames(context, waiting)
    place = branch_that_skipped_call(context, rank, path)
    return _Departed(rank=rank, place=place, step=None, facts={"did": "went past", "waiting_rank": waiting})


def _transfers(context: DiagnosisContext, rank: int, partner: int) -> list[Event]:
    """Return the rank's transfers with `partner` whose callers are known."""
    return [
        event for event in context.timelines[rank].events if event.transfer and event.root == partner and event.chain
    ]


def _decided_at(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the branch that decides whether the skipped call is reached, else the line of the call."""
    branch = context.program.deciding_branch(place, None) if place else None
    return place if branch is None else branch.place


def _exit(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the line that leaves the loop around the call, else the line of the loop."""
    loop = next(iter(context.program.loops_around(place)), None) if place else None
    if loop is None:
        return place
    return Place(file=loop.file, line=loop.exits[0].line if loop.exits else loop.line, function=loop.function)


def _origin_of_mismatch(context: DiagnosisContext, roots: Sequence[Wait]) -> Place | None:
    """Return the line from which two sides of a transfer get arguments or iterations that do not match, or None.

    First try the arguments: a partner or tag that depends on the rank. Then try the loops around the waiting lines: a
    number of iterations that may differ between ranks, and with it the number of transfers.
    """
    for root in roots:
        frames = tuple(reversed(own_frames(context, root.rank)))
        transfers = [event for peer in root.peers for event in _transfers(context, root.rank, peer)]
        chain = transfers[-1].chain if transfers else frames
        origin = origin_of_arguments(context.program, chain, own_rank=False)
        if origin is not None and origin.of_rank:
            return origin.place
    for root in roots:
        frames = tuple(reversed(own_frames(context, root.rank)))
        for loop in context.program.loops_around(frames[0]) if frames else ():
            origin = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), frames[1:])
            if origin is not None:
                return origin.place
    return None


def _parties(context: DiagnosisContext) -> tuple[int, ...]:
    """Return the ranks that wait in a transfer, and the ranks that they wait for."""
    waiting = [root for root in context.roots if root.kind in (WaitKind.POINT_TO_POINT, WaitKind.TRANSPORT)]
    return tuple(sorted({rank for root in waiting for rank in (root.rank, *root.peers)}))


def _all_peers_wait(roots: Sequence[Wait]) -> bool:
    """Return whether every awaited rank is a root in a transfer too, so that no side skipped its half."""
    return {peer for root in roots for peer in root.peers} <= {root.rank for root in roots}
