"""Rules about ranks that wait for each other outside collectives, such as in group creation or for store keys."""

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
    place_of,
    program_frames,
    root_where,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.evidence import Call, Evidence, StoreKeyWrites
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.evidence.network import host_of
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.group_waits import missing_rank
from nsa_harness.core.verdict.wait import Wait, WaitKind

_INIT = "init_process_group"
_GROUP_CREATORS = ("new_group", "new_subgroups", "split_group")
_MIN_RETRANSMITS = 3  # a segment that was sent again this often has had no answer for seconds


def _waits_in_group_creation(at_init: bool) -> Callable[[DiagnosisContext], tuple[list[Wait], Call] | None]:
    """Return a function for `@rule_if` that finds ranks that hang while creating a process group.

    It returns all ranks in such a wait, and the call of the first. `at_init`: search for `init_process_group`;
    otherwise, for the creation of a later group.
    """

    def find(context: DiagnosisContext) -> tuple[list[Wait], Call] | None:
        at_root = any(root.kind is WaitKind.GROUP_CREATION for root in hung_roots(context))
        waits = [wait for wait in context.waits.values() if at_root and wait.kind is WaitKind.GROUP_CREATION]
        calls = [(wait, wait.call) for wait in waits if wait.call and (wait.call.op == _INIT) is at_init]
        return ([wait for wait, _ in calls], calls[0][1]) if calls else None

    return find


@rule_if(_waits_in_group_creation(True))
def rendezvous_missing_rank(context: DiagnosisContext, waiting: list[Wait], _: Call) -> Explanation:
    """Explain a hang in which ranks wait in `init_process_group` for a rank that never called it."""
    absent_ranks = _absent_ranks(waiting)
    line = wait_place(context, waiting[0])
    absent_wait = _first_wait_of(context, absent_ranks)
    return Explanation(
        cause=Cause.RENDEZVOUS_MISSING_RANK,
        evidence=EvidenceKind.RECORD,
        facts={
            "variant": "waits",
            "line": line,
            "waiting": [wait.rank for wait in waiting],
            "elsewhere": _wait_facts(absent_wait),
        },
        ranks=absent_ranks,
        place=(wait_place(context, absent_wait) if absent_wait else None) or line,
        proof=dump_proof(context, waiting[0]),
    )


@rule_if(_waits_in_group_creation(False))
def group_creation_subset(context: DiagnosisContext, waiting: list[Wait], call: Call) -> Explanation:
    """Explain a hang in which ranks create different process groups, or the same groups in different orders."""
    absent_ranks = _ranks_with_fewer_groups(context, waiting) or _absent_ranks(waiting)
    waiting = [wait for wait in waiting if wait.rank not in absent_ranks] or waiting
    call = _first_skipped_creation(context, waiting, absent_ranks) or waiting[0].call or call
    later = waiting[0].call  # the call that waits now; it creates a later group if the ranks skipped `call`
    has_other_number = later is not None and later.number != call.number
    return Explanation(
        cause=Cause.GROUP_CREATION_SUBSET,
        evidence=EvidenceKind.RECORD,
        facts={
            "op": call.op,
            "line": call.place,
            "later": {"op": later.op, "line": later.place} if later and has_other_number else None,
            "waiting": [wait.rank for wait in waiting],
            "elsewhere": _wait_facts(_first_wait_of(context, absent_ranks)),
        },
        ranks=absent_ranks,
        place=call.place or wait_place(context, waiting[0]),
        proof=dump_proof(context, waiting[0]),
    )


def _ranks_with_fewer_groups(context: DiagnosisContext, waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that created fewer process groups than the others."""
    if not {peer for wait in waiting for peer in wait.peers} <= {wait.rank for wait in waiting}:
        return ()
    status_files = {wait.rank: context.status_files.get(wait.rank) for wait in waiting}
    group_counts = {
        rank: sum(call.op.startswith(_GROUP_CREATORS) for call in status_file.calls)
        for rank, status_file in status_files.items()
        if status_file
    }
    fewest = min(group_counts.values(), default=0)
    behind = tuple(rank for rank, count in sorted(group_counts.items()) if count == fewest)
    return behind if len(behind) < len(waiting) else ()


def _first_skipped_creation(
    context: DiagnosisContext, waiting: Sequence[Wait], absent_ranks: Sequence[int]
) -> Call | None:
    """Return the first process group creation that an absent rank skipped, or None if there is none."""
    status_files = context.status_files
    waiting_board = status_files.get(waiting[0].rank)
    absent_board = next((status_files[rank] for rank in absent_ranks if rank in status_files), None)
    if waiting_board is None or absent_board is None:
        return None
    call_counts = Counter((call.op, call.place) for call in absent_board.calls)
    for call in waiting_board.calls:
        if call.op.startswith(_GROUP_CREATORS):
            call_counts[call.op, call.place] -= 1
            if call_counts[call.op, call.place] < 0:
                return call
    return None


def store_key_missing(context: DiagnosisContext) -> Explanation | None:
    """Explain a hang in which a rank waits for a store key that no rank has set."""
    roots = [(root, root.call) for root in hung_roots(context) if root.kind is WaitKind.STORE and root.call is not None]
    if not roots:
        return None
    root, call = _end_of_chain(context, roots)
    return _explain_missing_key(
        context,
        call.key,
        [root.rank, *(wait.rank for wait, _ in roots if wait.rank != root.rank)],
        call.place or wait_place(context, root),
        evidence=EvidenceKind.CLOSED if root.is_closed else EvidenceKind.OPEN,
        proof=dump_proof(context, root),
    )


def _end_of_chain(context: DiagnosisContext, roots: Sequence[tuple[Wait, Call]]) -> tuple[Wait, Call]:
    """Return the wait to explain. A rank that waits for a key itself cannot set the key that the first rank waits for.

    If the waits form a cycle, the last wait before it closes is returned.
    """
    by_rank = {root.rank: (root, call) for root, call in roots}
    # In a cycle, the others already waited for the rank that began to wait last, so the chain must end at its key.
    root, call = max(roots, key=lambda one: one[1].entered_s)
    while by_rank.pop(root.rank, None):
        setter, writer = _key_setter(context, call.key), _rank_with_fewest_writes(context, call.key)
        ranks = setter.ranks if setter else () if writer is None else (writer[0],)
        root, call = next((by_rank[rank] for rank in ranks if rank in by_rank), (root, call))
    return root, call


def store_given_up(context: DiagnosisContext) -> Explanation | None:
    """Explain a failure in which a rank timed out while waiting for a store key."""
    first = context.first_failure
    error = first.exception if first and "DistStoreError" in first.text else None
    if first is None or first.rank is None or error is None:
        return None
    line = exception_place(context, first.rank, error)
    absent_rank, key = missing_rank(error.message), _TIMEOUT_KEY.search(error.message)
    if absent_rank is not None:
        return Explanation(
            cause=Cause.RENDEZVOUS_MISSING_RANK,
            evidence=EvidenceKind.RAISED,
            facts={"variant": "gave up", "waiting_rank": first.rank, "message": error.message},
            ranks=(absent_rank,),
            place=line,
            proof=(error.proof,),
        )
    if key is None:
        return None
    return _explain_missing_key(context, key[1], [first.rank], line, evidence=EvidenceKind.RAISED, proof=(error.proof,))


_TIMEOUT_KEY = re.compile(r"wait timeout after \d+ ?ms, keys: (\S+)")
_RANK_EQUALS = re.compile(r"rank\w*(?:\(\))?\s*==\s*(\d+)")
_KEY_PARTS = re.compile(r"\d+|[^\W\d_]+|[\W_]+")


def _explain_missing_key(
    context: DiagnosisContext,
    key: str,
    waiting: Sequence[int],
    line: Place | None,
    *,
    evidence: EvidenceKind,
    proof: tuple[str, ...],
) -> Explanation:
    """Create the explanation for a store key that was never set, blaming a rank that set similar keys before."""
    ranks: tuple[int, ...] = ()
    last_write: Facts | None = None
    setting_line: _KeySetter | None = None
    place: Place | None
    if (setter := _rank_with_fewest_writes(context, key)) is not None:
        rank, last = setter
        left_at = branch_that_skipped_call(context, rank, tuple(reversed(last.chain)), same_rank=True)
        set_at = place_of(context, rank, last.chain[0])
        ranks, place = (rank,), left_at or set_at
        last_write = {"rank": rank, "key": last.key, "line": set_at, "turned_off_at": left_at}
    else:
        setting_line = _key_setter(context, key)
        ranks, place = (
            (setting_line.ranks, setting_line.turns_off_at or setting_line.line) if setting_line else ((), None)
        )
    skipping_rank = None if ranks else rank_that_skipped_wait(context, waiting)
    if skipping_rank is not None and not (
        context.status_files.get(skipping_rank) and context.status_files[skipping_rank].keys_set
    ):
        ranks, place = (
            (skipping_rank,),
            place or branch_that_skipped_call(context, skipping_rank, program_frames(context, waiting[0])),
        )
    else:
        skipping_rank = None
    return Explanation(
        cause=Cause.STORE_KEY_MISSING,
        evidence=EvidenceKind.SOURCE if place and evidence is not EvidenceKind.OPEN else evidence,
        facts={
            "waiting_rank": waiting[0],
            "key": key,
            "line": line,
            "others_wait": evidence is EvidenceKind.CLOSED,
            "gave_up": evidence is EvidenceKind.RAISED,
            "set_before": last_write,
            "setter": dict(vars(setting_line)) if setting_line else None,
            "went_past": skipping_rank,
        },
        ranks=ranks or tuple(waiting),
        place=place or line,
        proof=proof,
    )


def _rank_with_fewest_writes(context: DiagnosisContext, keys: str) -> tuple[int, StoreKeyWrites] | None:
    """Return the rank that should set one of `keys`, and its last write of a similar key, or None.

    It is the rank with the fewest writes of keys that differ only in numbers or, if there are none, in one word. Of
    several such ranks, it is the one whose last key is most similar. None: there is no such rank, or more than one.
    """
    last_writes: list[tuple[tuple[int, int, int], int, StoreKeyWrites]] = []
    for rank, status_file in context.status_files.items():
        similar = [
            (difference, key_set)
            for key_set in status_file.keys_set
            for key in keys.split(",")
            if key_set.chain and (difference := _difference(key, key_set.key)) is not None
        ]
        if similar:
            words = min(difference[0] for difference, _ in similar)
            (_, numbers), last = max((one for one in similar if one[0][0] == words), key=lambda one: one[1].at_s)
            last_writes.append(((words, last.count, numbers), rank, last))
    least = min((order for order, _, _ in last_writes), default=None)
    behind = [(rank, last) for order, rank, last in last_writes if order == least]
    return behind[0] if len(behind) == 1 else None


def _difference(key: str, other: str) -> tuple[int, int] | None:
    """Return how many words and how many numbers of two similar keys differ, or None if the keys are not similar.

    Keys are similar if they consist of the same parts, of which only numbers, or one word after another one, differ.
    """
    parts, other_parts = _KEY_PARTS.findall(key), _KEY_PARTS.findall(other)
    if len(parts) != len(other_parts):
        return None
    pairs = [pair for pair in zip(parts, other_parts, strict=True) if pair[0] != pair[1]]
    numbers = sum(one.isdecimal() and other.isdecimal() for one, other in pairs)
    words = len(pairs) - numbers
    if words > 1 or (words and (numbers or parts[0] != other_parts[0] or not pairs[0][0].isalpha())):
        return None
    return words, numbers


@dataclass(frozen=True, kw_only=True)
class _KeySetter:
    line: Place
    ranks: tuple[int, ...]  # rank that sets the key according to the source code; empty: any rank
    under: str | None  # condition on the rank that guards the line; None: there is none
    turns_off_at: Place | None  # branch that may make a rank skip the line; None: there is none


def _key_setter(context: DiagnosisContext, key: str) -> _KeySetter | None:
    """Return the first line in the source code that sets `key`, or None if there is none."""
    program = context.program
    line, match = next(program.key_setters(key), (None, None))
    if line is None or match is None:
        return None
    call_path = list(program.only_call_path(line))
    conditions = [branch for caller in call_path for branch in program.branches(caller) if branch.reads_rank]
    branches = (
        branch
        for caller in call_path
        if (branch := program.deciding_branch(caller, None, same_rank=True)) and branch.may_differ
    )
    world_size = context.evidence.world_size
    named_ranks = [int(number) for number in match.groups() if number.isdigit() and int(number) < world_size]
    for condition in conditions:
        tested_ranks = [int(number) for number in _RANK_EQUALS.findall(condition.text) if int(number) < world_size]
        others = [rank for rank in range(world_size) if rank not in tested_ranks]
        named_ranks += tested_ranks if not condition.is_else else others if len(others) == 1 else ()
    return _KeySetter(
        line=line,
        ranks=tuple(named_ranks[:1]),
        under=conditions[0].text if conditions else None,
        turns_off_at=next((branch.place for branch in branches if not branch.reads_rank), None),
    )


@rule_if(root_where(lambda root: root.kind is WaitKind.TRANSPORT))
def transport(context: DiagnosisContext, root: Wait, _: tuple[int, ...]) -> Explanation | None:
    """Explain a hang in which all ranks are in the same collective and some sent data is not acknowledged."""
    sockets = sorted(unacknowledged_sockets(context.evidence), key=lambda pair: pair[0])
    if not sockets:
        return None
    ends = {(socket.local, socket.peer) for _, socket in sockets}
    is_both_ways = any((peer, local) in ends for local, peer in ends)
    sender, socket = sockets[0]
    return Explanation(
        cause=Cause.TRANSPORT,
        evidence=EvidenceKind.KERNEL if is_both_ways else EvidenceKind.OPEN,
        facts={
            "variant": "not acknowledged",
            "blocked_in": root.blocked_in,
            "sender": sender,
            "unacked_bytes": socket.unacked_bytes,
            "local": socket.local,
            "peer": socket.peer,
            "retransmits": socket.retransmits,
            "both_sides": is_both_ways,
            "other_data_arrive": _other_data_arrive(context.evidence, socket),
        },
        ranks=tuple(sorted({rank for rank, _ in sockets})),
        place=wait_place(context, root),
        proof=dump_proof(context, root),
    )


def _absent_ranks(waiting: Sequence[Wait]) -> tuple[int, ...]:
    """Return the awaited ranks that do not wait themselves, or else those that the first one waits for."""
    waiting_ranks = {wait.rank for wait in waiting}
    return tuple(sorted({peer for wait in waiting for peer in wait.peers} - waiting_ranks)) or waiting[0].peers


def _first_wait_of(context: DiagnosisContext, ranks: Sequence[int]) -> Wait | None:
    return next((wait for rank, wait in context.waits.items() if rank in ranks), None)


def _wait_facts(wait: Wait | None) -> Facts | None:
    return None if wait is None else {"rank": wait.rank, "blocked_in": wait.blocked_in}


def unacknowledged_sockets(evidence: Evidence) -> Iterator[tuple[int, Socket]]:
    """Yield the rank and the socket of each connection whose peer left data unacknowledged between two snapshots."""
    snapshots = [
        {
            (rank.rank, socket.inode): socket
            for rank in snapshot.ranks
            if rank.process
            for socket in rank.process.sockets
        }
        for snapshot in evidence.snapshots[-2:]
    ]
    for (rank, inode), socket in snapshots[-1].items() if snapshots[1:] else ():
        before = snapshots[0].get((rank, inode))
        if before is not None and _is_undelivered(before, socket):
            yield rank, socket


def _other_data_arrive(evidence: Evidence, stuck: Socket) -> bool:
    """Return whether another connection between the same two machines has delivered data between the snapshots."""
    ends = (host_of(stuck.local), host_of(stuck.peer))
    sent: dict[int, list[int]] = {}
    for snapshot in evidence.snapshots[-2:]:
        for process in (one for rank in snapshot.ranks for one in (rank.process, *rank.children) if one):
            for socket in process.sockets:
                if (host_of(socket.local), host_of(socket.peer)) == ends and socket.acked_bytes is not None:
                    sent.setdefault(socket.inode, []).append(socket.acked_bytes)
    return any(max(counts) > min(counts) for counts in sent.values())


def _is_undelivered(before: Socket, after: Socket) -> bool:
    """Return whether a socket between ranks holds the same unacknowledged data, although it was sent again."""
    goes_to_rank = after.peer_rank is not None or not after.in_job
    is_unacknowledged = before.unacked_bytes > 0 and after.unacked_bytes >= before.unacked_bytes
    is_retransmitted = after.retransmits >= _MIN_RETRANSMITS or after.retransmits > before.retransmits
    return goes_to_rank and is_unacknowledged and is_retransmitted and before.acked_bytes == after.acked_bytes
