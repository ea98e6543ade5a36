"""Rules about transfers between two ranks that do not complete: a skipped half, or another partner than before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.alignment import departure, last_transfer_of_loop
from nsa_harness.core.collectives.call_history import other_partner
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.call_paths import passer, turned_off_at
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
    """A rank waits in a transfer of which no rank calls the other half."""
    roots = [root for root in hung_roots(context) if root.kind is WaitKind.POINT_TO_POINT and root.closed]
    if any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context)):
        return None
    if not roots:
        return _past_each_other(context)
    if context.difference is not None and any(root.kind is WaitKind.COLLECTIVE for root in hung_roots(context)):
        return None  # a rank passed over a collective: that it then waits for its partner follows from it
    others = [root for root in hung_roots(context) if root.kind is not WaitKind.POINT_TO_POINT]
    departed = _departed(context, roots)
    place = departed.place if departed else _made_otherwise(context, roots)
    known = departed is not None and departed.step is not None
    return Explanation(
        cause=Cause.P2P_UNMATCHED,
        evidence=EvidenceKind.CLOSED if known or _in_transfers(roots) else EvidenceKind.PART,
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


def _past_each_other(context: DiagnosisContext) -> Explanation | None:
    """Both halves are there, the network has nothing left to deliver, and still neither ends."""
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
        place=_made_otherwise(context, roots) or wait_place(context, roots[0]),
        parties=_parties(context),
        proof=dump_proof(context, roots[0]),
    )


def _wait_facts(context: DiagnosisContext, root: Wait) -> Facts:
    """Return what a rank waits in; of an unmatched transfer which half, and with which ranks."""
    call = root.call if root.kind is WaitKind.POINT_TO_POINT else None
    half: Facts | None = {"op": call.op, "sends": "send" in operation(call), "peers": root.peers} if call else None
    return {"rank": root.rank, "blocked_in": root.blocked_in, "transfer": half, "line": wait_place(context, root)}


@dataclass(frozen=True, kw_only=True)
class _Departed:
    """The one rank, of those that others wait for, that broke the pattern of its earlier iterations."""

    rank: int
    place: Place | None
    step: int | None
    facts: Facts  # what it did


def _departed(context: DiagnosisContext, roots: Sequence[Wait]) -> _Departed | None:
    concerned = sorted({rank for root in roots for rank in (root.rank, *root.peers)})
    lines = {rank: context.timelines[rank] for rank in concerned if rank in context.timelines}
    awaited = {rank: line for rank, line in lines.items() if any(rank in root.peers for root in roots)}
    gone = {rank: event for rank, line in awaited.items() if (event := last_transfer_of_loop(line))}
    if len(gone) == 1:
        ((rank, last),) = gone.items()
        facts: Facts = {"did": "left its rounds", "op": last.op, "line": last.place}
        return _Departed(rank=rank, place=_exit(context, last.place), step=last.step, facts=facts)
    left = {rank: one for rank, line in awaited.items() if (one := departure(line))}
    left = {rank: one for rank, one in left.items() if one.expected.transfer}
    if len(left) == 1:
        ((rank, found),) = left.items()
        way = tuple(reversed(found.expected.chain))
        off = turned_off_at(context, rank, way, own=True) if way else None
        place = off or _decided_at(context, found.expected.place)
        facts = {"did": "skipped", "op": found.expected.op, "line": found.expected.place}
        return _Departed(rank=rank, place=place, step=found.made.step, facts=facts)
    turned = {rank: call for rank in lines if rank in context.boards and (call := other_partner(context.boards[rank]))}
    if len(turned) == 1:
        ((rank, call),) = turned.items()
        facts = {"did": "took another peer", "op": call.op, "line": call.place}
        return _Departed(rank=rank, place=call.place, step=call.step, facts=facts)
    return None if gone or left or turned else _went_past(context, roots)


def _went_past(context: DiagnosisContext, roots: Sequence[Wait]) -> _Departed | None:
    rank = passer(context, [root.rank for root in roots])
    if rank is None:
        return None
    waiting = next(root.rank for root in roots if rank in root.peers)
    made = _transfers(context, rank, waiting) or _transfers(context, waiting, rank)
    way = tuple(reversed(made[-1].chain)) if made else own_frames(context, waiting)
    place = turned_off_at(context, rank, way)
    return _Departed(rank=rank, place=place, step=None, facts={"did": "went past", "waiting_rank": waiting})


def _transfers(context: DiagnosisContext, rank: int, partner: int) -> list[Event]:
    """Return the transfers with this partner whose callers are known."""
    return [one for one in context.timelines[rank].events if one.transfer and one.root == partner and one.chain]


def _decided_at(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the line that decides whether the skipped call is reached, else the call itself."""
    branch = context.program.deciding_branch(place, None) if place else None
    return place if branch is None else branch.place


def _exit(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the line that leaves the loop around the call, else the loop itself."""
    loop = next(iter(context.program.loops_around(place)), None) if place else None
    if loop is None:
        return place
    return Place(file=loop.file, line=loop.exits[0].line if loop.exits else loop.line, function=loop.function)


def _made_otherwise(context: DiagnosisContext, roots: Sequence[Wait]) -> Place | None:
    """Return the line that may give the sides another partner or tag, else another number of transfers."""
    for root in roots:
        frames = tuple(reversed(own_frames(context, root.rank)))
        made = [one for peer in root.peers for one in _transfers(context, root.rank, peer)][-1:]
        chain = made[0].chain if made else frames
        found = origin_of_arguments(context.program, chain, own_rank=False)
        if found is not None and found.of_rank:
            return found.place
    for root in roots:
        frames = tuple(reversed(own_frames(context, root.rank)))
        for loop in context.program.loops_around(frames[0]) if frames else ():
            found = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), frames[1:])
            if found is not None:
                return found.place
    return None


def _parties(context: DiagnosisContext) -> tuple[int, ...]:
    """Return the ranks that wait in a transfer, and those that they wait for."""
    waiting = [root for root in context.roots if root.kind in (WaitKind.POINT_TO_POINT, WaitKind.TRANSPORT)]
    return tuple(sorted({rank for root in waiting for rank in (root.rank, *root.peers)}))


def _in_transfers(roots: Sequence[Wait]) -> bool:
    """Return whether every rank that they wait for is in a transfer too, so that no side skipped its half."""
    return {peer for root in roots for peer in root.peers} <= {root.rank for root in roots}
