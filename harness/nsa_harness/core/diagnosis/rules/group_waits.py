"""Rules about ranks that wait for each other outside collectives: groups, keys of the store, and the network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.call_paths import branch_that_skipped_call, rank_that_skipped_wait
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    exception_place,
    hung_roots,
    own_frames,
    place_of,
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, given
from nsa_harness.core.evidence.evidence import Call, Evidence, StoreKeyWrites
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.group_waits import missing_rank
from nsa_harness.core.verdict.wait import Wait, WaitKind

_ENTRANCE = "init_process_group"
_MAKES_GROUPS = ("new_group", "new_subgroups", "split_group")
_RETRANSMITS = 3  # of one segment in a row, which takes seconds without an answer


def _group_creation(entrance: bool) -> Callable[[DiagnosisContext], tuple[list[Wait], Call] | None]:
    """Find all waits in `init_process_group` (`entrance`) or in the creation of a later group, if a root is in one."""

    def find(context: DiagnosisContext) -> tuple[list[Wait], Call] | None:
        at_root = any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context))
        waits = [wait for wait in context.waits.values() if at_root and wait.kind is WaitKind.GROUP_CREATION]
        calls = [(wait, wait.call) for wait in waits if wait.call and (wait.call.op == _ENTRANCE) is entrance]
        return ([wait for wait, _ in calls], calls[0][1]) if calls else None

    return find


@given(_group_creation(True))
def rendezvous_missing_rank(context: DiagnosisContext, waiting: list[Wait], _: Call) -> Explanation:
    """A rank never reached init_process_group, and the others wait for it."""
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


@given(_group_creation(False))
def group_creation_subset(context: DiagnosisContext, waiting: list[Wait], call: Call) -> Explanation:
    """Some ranks created a group that the others did not create, or created in another order."""
    absent = _ranks_with_fewer_groups(context, waiting) or _absent(waiting)
    waiting = [wait for wait in waiting if wait.rank not in absent] or waiting
    call = _first_skipped_creation(context, waiting, absent) or waiting[0].call or call
    later = waiting[0].call  # creates a later group, which has another number on the ranks that skipped `call`
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


def _ranks_with_fewer_groups(context: DiagnosisContext, waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that created fewer groups, if all ranks are creating one and wait for each other; else ()."""
    if not {peer for wait in waiting for peer in wait.peers} <= {wait.rank for wait in waiting}:
        return ()
    boards = {wait.rank: context.boards.get(wait.rank) for wait in waiting}
    made = {
        rank: sum(call.op.startswith(_MAKES_GROUPS) for call in board.calls) for rank, board in boards.items() if board
    }
    fewest = min(made.values(), default=0)
    behind = tuple(rank for rank, count in sorted(made.items()) if count == fewest)
    return behind if len(behind) < len(waiting) else ()


def _first_skipped_creation(context: DiagnosisContext, waiting: Sequence[Wait], absent: Sequence[int]) -> Call | None:
    """Return the first call of the first waiting rank that creates a group and that the first absent rank skipped.

    Calls on one line are counted: the absent rank skipped the third if it called this line only twice.
    """
    boards = context.boards
    waiting_board = boards.get(waiting[0].rank)
    absent_board = next((boards[rank] for rank in absent if rank in boards), None)
    if waiting_board is None or absent_board is None:
        return None
    unmatched = Counter((call.op, call.place) for call in absent_board.calls)
    for call in waiting_board.calls:
        if call.op.startswith(_MAKES_GROUPS):
            unmatched[call.op, call.place] -= 1
            if unmatched[call.op, call.place] < 0:
                return call
    return None


def store_key_missing(context: DiagnosisContext) -> Explanation | None:
    """A rank waits for a key of the store that no rank has set."""
    roots = [(root, root.call) for root in hung_roots(context) if root.kind is WaitKind.STORE and root.call is not None]
    if not roots:
        return None
    root, call = roots[0]
    return _explain_missing_key(
        context,
        call.key,
        [wait.rank for wait, _ in roots],
        call.place or wait_place(context, root),
        evidence=EvidenceKind.CLOSED if root.closed else EvidenceKind.OPEN,
        proof=dump_proof(context, root),
    )


def store_given_up(context: DiagnosisContext) -> Explanation | None:
    """A wait for a key of the store timed out: for the key of another rank at the rendezvous, or one of the program."""
    first = context.first_failure
    raised = first.raised if first and "DistStoreError" in first.text else None
    if first is None or first.rank is None or raised is None:
        return None
    line = exception_place(context, first.rank, raised)
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
    return _explain_missing_key(
        context, key[1], [first.rank], line, evidence=EvidenceKind.RAISED, proof=(raised.proof,)
    )


_KEY = re.compile(r"wait timeout after \d+ ?ms, keys: (\S+)")
_THIS_RANK = re.compile(r"rank\w*(?:\(\))?\s*==\s*(\d+)")
_NUMBERS = re.compile(r"\d+")


def _explain_missing_key(
    context: DiagnosisContext,
    key: str,
    waiting: Sequence[int],
    line: Place | None,
    *,
    evidence: EvidenceKind,
    proof: tuple[str, ...],
) -> Explanation:
    """Explain a missing key by the rank that set such keys before, else by the line of the source that sets it.

    The place is the branch at which that rank left the path to the line.
    """
    who: tuple[int, ...] = ()
    before: Facts | None = None
    written: _SettingLine | None = None
    where: Place | None
    if (setter := _rank_that_set(context, key)) is not None:
        rank, last = setter
        left_at = branch_that_skipped_call(context, rank, tuple(reversed(last.chain)), own=True)
        set_at = place_of(context, rank, last.chain[0])
        who, where = (rank,), left_at or set_at
        before = {"rank": rank, "key": last.key, "line": set_at, "turned_off_at": left_at}
    else:
        written = _setting_line(context, key)
        who, where = (written.ranks, written.turns_off_at or written.line) if written else ((), None)
    past = None if who else rank_that_skipped_wait(context, waiting)
    if past is not None and not (context.boards.get(past) and context.boards[past].keys_set):
        who, where = (past,), where or branch_that_skipped_call(context, past, own_frames(context, waiting[0]))
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


def _rank_that_set(context: DiagnosisContext, keys: str) -> tuple[int, StoreKeyWrites] | None:
    """Return the rank that set keys of this form least often, and its last such key; None if several ranks did."""
    forms = {_NUMBERS.sub("#", key) for key in keys.split(",")}
    last_set = {
        rank: max(matching, key=lambda key_set: key_set.at_s)
        for rank, board in context.boards.items()
        if (
            matching := [
                key_set for key_set in board.keys_set if _NUMBERS.sub("#", key_set.key) in forms and key_set.chain
            ]
        )
    }
    fewest = min((key_set.count for key_set in last_set.values()), default=0)
    behind = [(rank, key_set) for rank, key_set in last_set.items() if key_set.count == fewest]
    return behind[0] if len(behind) == 1 else None


@dataclass(frozen=True, kw_only=True)
class _SettingLine:
    """The line of the source that sets a key."""

    line: Place
    ranks: tuple[int, ...]  # the rank that the source names; empty: any rank
    under: str | None  # the condition on the rank that guards the line
    turns_off_at: Place | None  # the branch that may make a rank skip the line


def _setting_line(context: DiagnosisContext, key: str) -> _SettingLine | None:
    """Return the first line of the source that sets this key, with the conditions on the path to it."""
    program = context.program
    line, match = next(program.key_setters(key), (None, None))
    if line is None:
        return None
    call_path = list(program.only_call_path(line))
    tests = [branch for each in call_path for branch in program.branches(each) if branch.of_rank]
    decides = (
        branch
        for each in call_path
        if (branch := program.deciding_branch(each, None, same_rank=True)) and branch.varies
    )
    numbers = [
        *(match.groups() if match else ()),
        *(match[1] for test in tests for match in _THIS_RANK.finditer(test.text)),
    ]
    return _SettingLine(
        line=line,
        ranks=tuple(
            int(number) for number in numbers if number.isdigit() and int(number) < context.evidence.world_size
        )[:1],
        under=tests[0].text if tests else None,
        turns_off_at=next((branch.place for branch in decides if not branch.of_rank), None),
    )


@given(standing(lambda root: root.kind is WaitKind.TRANSPORT))
def transport(context: DiagnosisContext, root: Wait, _: tuple[int, ...]) -> Explanation | None:
    """All ranks are in one collective, no call differs, and the kernel has sent data that no peer acknowledges."""
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
        ranks=tuple(sorted({rank for rank, _ in stuck})),
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _absent(waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that the waiting ranks wait for and that are not waiting themselves."""
    inside = {wait.rank for wait in waiting}
    return tuple(sorted({peer for wait in waiting for peer in wait.peers} - inside)) or waiting[0].peers


def _elsewhere(context: DiagnosisContext, ranks: Sequence[int]) -> Wait | None:
    """Return the wait of the first of these ranks whose wait is known."""
    return next((wait for rank, wait in context.waits.items() if rank in ranks), None)


def _whereabouts(wait: Wait | None) -> Facts | None:
    return None if wait is None else {"rank": wait.rank, "blocked_in": wait.blocked_in}


def stuck_sockets(evidence: Evidence) -> Iterator[tuple[int, Socket]]:
    """Yield each socket whose data a peer rank did not acknowledge between two snapshots, in spite of retransmits."""
    looks = [
        {(rank.rank, socket.inode): socket for rank in look.ranks if rank.process for socket in rank.process.sockets}
        for look in evidence.snapshots[-2:]
    ]
    for (rank, inode), socket in looks[-1].items() if looks[1:] else ():
        before = looks[0].get((rank, inode))
        if before is not None and _undelivered(before, socket):
            yield rank, socket


def _undelivered(before: Socket, after: Socket) -> bool:
    to_rank = after.peer_rank is not None or not after.in_job
    held = before.unacked_bytes > 0 and after.unacked_bytes >= before.unacked_bytes
    repeated = after.retransmits >= _RETRANSMITS or after.retransmits > before.retransmits
    return to_rank and held and repeated and before.acked_bytes == after.acked_bytes
