"""Rules about ranks that wait for each other outside collectives: groups, keys of the store, and the network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.call_paths import passer, turned_off_at
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    hung_roots,
    own_frames,
    place_of,
    raised_at,
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, given
from nsa_harness.core.evidence.evidence import Call, Evidence, KeySet
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.group_waits import missing_rank
from nsa_harness.core.verdict.wait import Wait, WaitKind

_ENTRANCE = "init_process_group"
_MAKES_GROUPS = ("new_group", "new_subgroups", "split_group")
_RETRANSMITS = 3  # of one segment in a row: seconds without an answer


def _making(entrance: bool) -> Callable[[DiagnosisContext], tuple[list[Wait], Call] | None]:
    """Find all waits in the making of the first group, or of a later one, if one is at the root of a hang."""

    def find(context: DiagnosisContext) -> tuple[list[Wait], Call] | None:
        at_root = any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context))
        waits = [wait for wait in context.waits.values() if at_root and wait.kind is WaitKind.GROUP_CREATION]
        calls = [(wait, wait.call) for wait in waits if wait.call and (wait.call.op == _ENTRANCE) is entrance]
        return ([wait for wait, _ in calls], calls[0][1]) if calls else None

    return find


@given(_making(True))
def rendezvous_missing_rank(context: DiagnosisContext, waiting: list[Wait], _: Call) -> Explanation:
    """Some rank never came to init_process_group, and the others wait for it."""
    absent = _absent(waiting)
    line = wait_place(context, waiting[0])
    elsewhere = _elsewhere(context, absent)
    return Explanation(
        cause=Cause.RENDEZVOUS_MISSING_RANK,
        evidence=EvidenceKind.RECORD,
        facts={
            "variant": "waits",
            "line": line,
            "waiting": [wait.rank for wait in waiting],
            "elsewhere": _whereabouts(elsewhere),
        },
        ranks=absent,
        place=(wait_place(context, elsewhere) if elsewhere else None) or line,
        proof=dump_proof(context, waiting[0]),
    )


@given(_making(False))
def group_creation_subset(context: DiagnosisContext, waiting: list[Wait], call: Call) -> Explanation:
    absent = _behind(context, waiting) or _absent(waiting)
    waiting = [wait for wait in waiting if wait.rank not in absent] or waiting
    call = _never_made(context, waiting, absent) or waiting[0].call or call
    later = waiting[0].call  # of a later group, whose number is another one on the ranks that skipped this call
    renumbered = later is not None and later.number != call.number
    return Explanation(
        cause=Cause.GROUP_CREATION_SUBSET,
        evidence=EvidenceKind.RECORD,
        facts={
            "op": call.op,
            "line": call.place,
            "later": {"op": later.op, "line": later.place} if later and renumbered else None,
            "waiting": [wait.rank for wait in waiting],
            "elsewhere": _whereabouts(_elsewhere(context, absent)),
        },
        ranks=absent,
        place=call.place or wait_place(context, waiting[0]),
        proof=dump_proof(context, waiting[0]),
    )


def _behind(context: DiagnosisContext, waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that made fewer groups, if all of them make one and wait for each other; else ()."""
    if not {peer for wait in waiting for peer in wait.peers} <= {wait.rank for wait in waiting}:
        return ()
    boards = {wait.rank: context.boards.get(wait.rank) for wait in waiting}
    made = {
        rank: sum(one.op.startswith(_MAKES_GROUPS) for one in board.calls) for rank, board in boards.items() if board
    }
    fewest = min(made.values(), default=0)
    behind = tuple(rank for rank, count in sorted(made.items()) if count == fewest)
    return behind if len(behind) < len(waiting) else ()


def _never_made(context: DiagnosisContext, waiting: Sequence[Wait], absent: Sequence[int]) -> Call | None:
    """Return the first call that makes a group, which a waiting rank made and an absent rank did not."""
    made, lacks = context.boards.get(waiting[0].rank), [board for rank in absent if (board := context.boards.get(rank))]
    left = Counter((one.op, one.place) for one in lacks[0].calls) if lacks else Counter[tuple[str, Place | None]]()
    for one in made.calls if made and lacks else ():
        if one.op.startswith(_MAKES_GROUPS):
            left[one.op, one.place] -= 1
            if left[one.op, one.place] < 0:
                return one
    return None


def store_key_missing(context: DiagnosisContext) -> Explanation | None:
    """A rank waits for a key of the store that no rank has set."""
    roots = [(root, root.call) for root in hung_roots(context) if root.kind is WaitKind.STORE and root.call is not None]
    if not roots:
        return None
    root, call = roots[0]
    return _unset(
        context,
        call.key,
        [one.rank for one, _ in roots],
        call.place or wait_place(context, root),
        evidence=EvidenceKind.CLOSED if root.closed else EvidenceKind.OPEN,
        proof=dump_proof(context, root),
    )


def store_given_up(context: DiagnosisContext) -> Explanation | None:
    """A rank waited for a key as long as the store allows: another rank's at the rendezvous, or one of the program."""
    first = context.first_failure
    raised = first.raised if first and "DistStoreError" in first.text else None
    if first is None or first.rank is None or raised is None:
        return None
    line = raised_at(context, first.rank, raised)
    absent, key = missing_rank(raised.message), _KEY.search(raised.message)
    if absent is not None:
        return Explanation(
            cause=Cause.RENDEZVOUS_MISSING_RANK,
            evidence=EvidenceKind.RAISED,
            facts={"variant": "gave up", "waiting_rank": first.rank, "message": raised.message},
            ranks=(absent,),
            place=line,
            proof=(raised.proof,),
        )
    if key is None:
        return None
    return _unset(context, key[1], [first.rank], line, evidence=EvidenceKind.RAISED, proof=(raised.proof,))


_KEY = re.compile(r"wait timeout after \d+ ?ms, keys: (\S+)")
_THIS_RANK = re.compile(r"rank\w*(?:\(\))?\s*==\s*(\d+)")
_NUMBERS = re.compile(r"\d+")


def _unset(
    context: DiagnosisContext,
    key: str,
    waiting: Sequence[int],
    line: Place | None,
    *,
    evidence: EvidenceKind,
    proof: tuple[str, ...],
) -> Explanation:
    """Explain with the rank that set such keys before, and where it turned off, else with what the source shows."""
    who: tuple[int, ...] = ()
    before: Facts | None = None
    written: _Written | None = None
    where: Place | None
    if (setter := _setter(context, key)) is not None:
        rank, last = setter
        turned = turned_off_at(context, rank, tuple(reversed(last.chain)), own=True)
        set_at = place_of(context, rank, last.chain[0])
        who, where = (rank,), turned or set_at
        before = {"rank": rank, "key": last.key, "line": set_at, "turned_off_at": turned}
    else:
        written = _written(context, key)
        who, where = (written.ranks, written.turns_off_at or written.line) if written else ((), None)
    past = None if who else passer(context, waiting)
    if past is not None and not (context.boards.get(past) and context.boards[past].keys_set):
        who, where = (past,), where or turned_off_at(context, past, own_frames(context, waiting[0]))
    else:
        past = None
    return Explanation(
        cause=Cause.STORE_KEY_MISSING,
        evidence=EvidenceKind.SOURCE if where and evidence is not EvidenceKind.OPEN else evidence,
        facts={
            "waiting_rank": waiting[0],
            "key": key,
            "line": line,
            "others_wait": evidence is EvidenceKind.CLOSED,
            "gave_up": evidence is EvidenceKind.RAISED,
            "set_before": before,
            "setter": dict(vars(written)) if written else None,
            "went_past": past,
        },
        ranks=who or tuple(waiting),
        place=where or line,
        proof=proof,
    )


def _setter(context: DiagnosisContext, keys: str) -> tuple[int, KeySet] | None:
    """Return the one rank that set keys of this form before; of several, the rank that did so least often."""
    forms = {_NUMBERS.sub("#", key) for key in keys.split(",")}
    alike = {
        rank: max(some, key=lambda one: one.at_s)
        for rank, board in context.boards.items()
        if (some := [one for one in board.keys_set if _NUMBERS.sub("#", one.key) in forms and one.chain])
    }
    fewest = min((one.count for one in alike.values()), default=0)
    behind = [(rank, one) for rank, one in alike.items() if one.count == fewest]
    return behind[0] if len(behind) == 1 else None


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The line of the source that sets such a key."""

    line: Place
    ranks: tuple[int, ...]  # which the source names; empty: any
    under: str | None  # the test on the rank under which the line is reached
    turns_off_at: Place | None  # what may keep a rank from it


def _written(context: DiagnosisContext, key: str) -> _Written | None:
    program = context.program
    line, found = next(program.key_setters(key), (None, None))
    if line is None:
        return None
    way = list(program.only_call_path(line))
    tests = [one for each in way for one in program.branches(each) if one.of_rank]
    decides = (one for each in way if (one := program.deciding_branch(each, None, same_rank=True)) and one.varies)
    numbers = [
        *(found.groups() if found else ()),
        *(one[1] for test in tests for one in _THIS_RANK.finditer(test.text)),
    ]
    return _Written(
        line=line,
        ranks=tuple(int(one) for one in numbers if one.isdigit() and int(one) < context.evidence.world_size)[:1],
        under=tests[0].text if tests else None,
        turns_off_at=next((one.place for one in decides if not one.of_rank), None),
    )


@given(standing(lambda root: root.kind is WaitKind.TRANSPORT))
def transport(context: DiagnosisContext, root: Wait, _: tuple[int, ...]) -> Explanation | None:
    """All ranks are in one collective, nothing differs, and the kernel has data that no peer acknowledges."""
    stuck = sorted(stuck_sockets(context.evidence), key=lambda pair: pair[0])
    if not stuck:
        return None
    ends = {(socket.local, socket.peer) for _, socket in stuck}
    both = any((peer, local) in ends for local, peer in ends)
    sender, socket = stuck[0]
    return Explanation(
        cause=Cause.TRANSPORT,
        evidence=EvidenceKind.KERNEL if both else EvidenceKind.OPEN,
        facts={
            "variant": "not acknowledged",
            "blocked_in": root.blocked_in,
            "sender": sender,
            "unacked_bytes": socket.unacked_bytes,
            "local": socket.local,
            "peer": socket.peer,
            "retransmits": socket.retransmits,
            "both_sides": both,
        },
        ranks=tuple(sorted({one for one, _ in stuck})),
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _absent(waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that the waiting ranks wait for, without themselves."""
    inside = {wait.rank for wait in waiting}
    return tuple(sorted({peer for wait in waiting for peer in wait.peers} - inside)) or waiting[0].peers


def _elsewhere(context: DiagnosisContext, ranks: Sequence[int]) -> Wait | None:
    """Return what the first of these ranks that was seen waits in."""
    return next((wait for rank, wait in context.waits.items() if rank in ranks), None)


def _whereabouts(wait: Wait | None) -> Facts | None:
    return None if wait is None else {"rank": wait.rank, "blocked_in": wait.blocked_in}


def stuck_sockets(evidence: Evidence) -> Iterator[tuple[int, Socket]]:
    """Yield connections to ranks whose data stayed unacknowledged between two snapshots in spite of retransmits."""
    looks = [
        {(rank.rank, one.inode): one for rank in look.ranks if rank.process for one in rank.process.sockets}
        for look in evidence.snapshots[-2:]
    ]
    for (rank, inode), one in looks[-1].items() if looks[1:] else ():
        before = looks[0].get((rank, inode))
        if before is not None and _undelivered(before, one):
            yield rank, one


def _undelivered(before: Socket, after: Socket) -> bool:
    to_rank = after.peer_rank is not None or not after.in_job
    held = before.unacked_bytes > 0 and after.unacked_bytes >= before.unacked_bytes
    repeated = after.retransmits >= _RETRANSMITS or after.retransmits > before.retransmits
    return to_rank and held and repeated and before.acked_bytes == after.acked_bytes
