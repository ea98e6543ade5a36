"""Rules about point-to-point transfers that never complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.collectives.call_history import call_with_changed_peer
from nsa_harness.core.collectives.call_patterns import last_transfer_of_loop, pattern_break
from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.diagnosis.call_paths import branch_that_skipped_call, rank_that_skipped_wait
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, dump_proof, hung_roots, program_frames, wait_place
from nsa_harness.core.diagnosis.explanation import Explanation
from nsa_harness.core.diagnosis.rules.group_waits import unacknowledged_sockets
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.value_origin import origin_of_arguments, origin_of_loop
from nsa_harness.core.verdict.group_waits import TRANSFERS, operation
from nsa_harness.core.verdict.wait import Wait, WaitKind


def p2p_unmatched(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which a rank waits in a send or receive that has no matching call on another rank."""
    roots = [root for root in hung_roots(context) if root.kind is WaitKind.POINT_TO_POINT and root.is_closed]
    if any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context)):
        return None
    if not roots:
        return _unmatched_halves(context)
    if context.difference is not None and any(root.kind is WaitKind.COLLECTIVE for root in hung_roots(context)):
        return None  # a skipped collective explains the wait for a partner
    other_roots = [root for root in hung_roots(context) if root.kind is not WaitKind.POINT_TO_POINT]
    pattern_break = _find_pattern_break(context, roots)
    place = pattern_break.place if pattern_break else _origin_of_mismatch(context, roots)
    has_step = pattern_break is not None and pattern_break.step is not None
    return Explanation(
        cause=Cause.P2P_UNMATCHED,
        evidence=EvidenceKind.CLOSED if has_step or _all_peers_wait(roots) else EvidenceKind.PART,
        facts={
            "variant": "half is missing",
            "waits": [_wait_facts(context, root) for root in (*roots[:2], *other_roots[:2])],
            "more_waits": max(len(roots) - 2, 0),
            "departed": pattern_break.facts if pattern_break else None,
        },
        ranks=(pattern_break.rank,) if pattern_break else tuple(sorted(root.rank for root in roots)),
        place=place or wait_place(context, roots[0]),
        step=pattern_break.step if pattern_break else None,
        parties=_transfer_ranks(context),
        proof=dump_proof(context, roots[0]),
    )


def _unmatched_halves(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which a send and a receive do not match, although all data was delivered."""
    roots = [root for root in hung_roots(context) if root.kind is WaitKind.TRANSPORT]
    roots = [root for root in roots if root.call is not None and operation(root.call) in TRANSFERS]
    if not roots or any(unacknowledged_sockets(context.evidence)):
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
        parties=_transfer_ranks(context),
        proof=dump_proof(context, roots[0]),
    )


def _wait_facts(context: DiagnosisContext, root: Wait) -> Facts:
    """Return facts about a rank's wait, including its transfer if no other rank made the matching call."""
    call = root.call if root.kind is WaitKind.POINT_TO_POINT else None
    half: Facts | None = {"op": call.op, "sends": "send" in operation(call), "peers": root.peers} if call else None
    return {"rank": root.rank, "blocked_in": root.blocked_in, "transfer": half, "line": wait_place(context, root)}


@dataclass(frozen=True, kw_only=True)
class _PatternBreak:
    """One rank's deviation from the pattern of its earlier transfers."""

    rank: int
    place: Place | None  # where the fix belongs
    step: int | None  # step in which the rank broke its pattern
    facts: Facts  # how the rank broke its pattern


def _find_pattern_break(context: DiagnosisContext, roots: Sequence[Wait]) -> _PatternBreak | None:
    """Return the deviation of the only rank that broke the pattern of its earlier transfers, or None if there is none.

    The rank ended its loop of transfers, skipped a transfer, changed its partner, or skipped the wait that the others
    are in.
    """
    ranks = sorted({rank for root in roots for rank in (root.rank, *root.peers)})
    timelines = {rank: context.timelines[rank] for rank in ranks if rank in context.timelines}
    # If a waiting rank has left its loop too, the pattern of the loop does not show which rank is wrong.
    awaited_ranks = {peer for root in roots if _is_in_loop(timelines.get(root.rank)) for peer in root.peers}
    awaited_timelines = {rank: line for rank, line in timelines.items() if rank in awaited_ranks}
    ended_loops = {rank: event for rank, line in awaited_timelines.items() if (event := last_transfer_of_loop(line))}
    if len(ended_loops) == 1:
        ((rank, last),) = ended_loops.items()
        facts: Facts = {"did": "left its rounds", "op": last.op, "line": last.place}
        return _PatternBreak(rank=rank, place=_loop_exit(context, last.place), step=last.step, facts=facts)
    departures = {
        rank: rank_departure for rank, line in awaited_timelines.items() if (rank_departure := pattern_break(line))
    }
    departures = {
        rank: rank_departure for rank, rank_departure in departures.items() if rank_departure.expected.is_transfer
    }
    if len(departures) == 1:
        ((rank, rank_departure),) = departures.items()
        path = tuple(reversed(rank_departure.expected.chain))
        branch = branch_that_skipped_call(context, rank, path, same_rank=True) if path else None
        place = branch or _skipping_branch(context, rank_departure.expected.place)
        facts = {"did": "skipped", "op": rank_departure.expected.op, "line": rank_departure.expected.place}
        return _PatternBreak(rank=rank, place=place, step=rank_departure.actual.step, facts=facts)
    partner_changes = {
        rank: call
        for rank in timelines
        if rank in context.status_files and (call := call_with_changed_peer(context.status_files[rank]))
    }
    if len(partner_changes) == 1:
        ((rank, call),) = partner_changes.items()
        facts = {"did": "took another peer", "op": call.op, "line": call.place}
        return _PatternBreak(rank=rank, place=call.place, step=call.step, facts=facts)
    return None if ended_loops or departures or partner_changes else _skipped_wait(context, roots)


def _is_in_loop(line: Timeline | None) -> bool:
    """Return whether the rank has made its latest call before, so that it is still in its loop of transfers."""
    latest = line.events[-1] if line and line.events else None
    return line is None or latest is None or any(event.site == latest.site for event in line.events[:-1])


def _skipped_wait(context: DiagnosisContext, roots: Sequence[Wait]) -> _PatternBreak | None:
    """Return the deviation of a rank that skipped the wait in which the other ranks hang, or None if there is none."""
    rank = rank_that_skipped_wait(context, [root.rank for root in roots])
    if rank is None:
        return None
    waiting_rank = next(root.rank for root in roots if rank in root.peers)
    transfers = _transfers_with(context, rank, waiting_rank) or _transfers_with(context, waiting_rank, rank)
    path = tuple(reversed(transfers[-1].chain)) if transfers else program_frames(context, waiting_rank)
    place = branch_that_skipped_call(context, rank, path)
    return _PatternBreak(rank=rank, place=place, step=None, facts={"did": "went past", "waiting_rank": waiting_rank})


def _transfers_with(context: DiagnosisContext, rank: int, partner: int) -> list[Event]:
    """Return the rank's transfers with `partner` whose call path is known."""
    return [
        event for event in context.timelines[rank].events if event.is_transfer and event.root == partner and event.chain
    ]


def _skipping_branch(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the branch that decides whether the call at `place` is reached, or `place` if there is none."""
    branch = context.program.deciding_branch(place, None) if place else None
    return place if branch is None else branch.place


def _loop_exit(context: DiagnosisContext, place: Place | None) -> Place | None:
    """Return the line that leaves the loop around `place`, else the loop's own line, or `place` if there is no loop."""
    loop = next(iter(context.program.loops_around(place)), None) if place else None
    if loop is None:
        return place
    return Place(file=loop.file, line=loop.exits[0].line if loop.exits else loop.line, function=loop.function)


def _origin_of_mismatch(context: DiagnosisContext, roots: Sequence[Wait]) -> Place | None:
    """Return the line that makes a send and a receive fail to match, or None if it is unknown."""
    for root in roots:
        frames = tuple(reversed(program_frames(context, root.rank)))
        transfers = [event for peer in root.peers for event in _transfers_with(context, root.rank, peer)]
        chain = transfers[-1].chain if transfers else frames
        origin = origin_of_arguments(context.program, chain, own_rank=False)
        if origin is not None and origin.differs_by_rank:
            return origin.place
    for root in roots:
        frames = tuple(reversed(program_frames(context, root.rank)))
        for loop in context.program.loops_around(frames[0]) if frames else ():
            origin = origin_of_loop(context.program, Place(file=loop.file, line=loop.line), frames[1:])
            if origin is not None:
                return origin.place
    return None


def _transfer_ranks(context: DiagnosisContext) -> tuple[int, ...]:
    """Return the ranks that wait in a send or receive, and the ranks that they wait for."""
    waiting = [root for root in context.roots if root.kind in (WaitKind.POINT_TO_POINT, WaitKind.TRANSPORT)]
    return tuple(sorted({rank for root in waiting for rank in (root.rank, *root.peers)}))


def _all_peers_wait(roots: Sequence[Wait]) -> bool:
    """Return whether every rank that is waited for also waits in a transfer."""
    return {peer for root in roots for peer in root.peers} <= {root.rank for root in roots}
