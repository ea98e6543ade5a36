"""Determine which other ranks a rank waits for, and in which distributed call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import (
    CREATIONS,
    ENTRANCE,
    Call,
    Collective,
    Frame,
    RankSnapshot,
    Stack,
    StatusFile,
)
from nsa_harness.core.evidence.stacks import NativeWait, group_call, in_probe, native_wait
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.wait import WaitKind, WaitState

_TORCH_DISTRIBUTED = "torch/distributed/"
_CHECKPOINT = "torch/distributed/checkpoint/"  # reads and writes files, which may be slow, and waits for no rank
_SENDS = {"send", "isend", "send_object_list"}
_RECEIVES = {"recv", "irecv", "recv_object_list"}
_BOTH_WAYS = {"batch_isend_irecv"}
TRANSFERS = frozenset({*_SENDS, *_RECEIVES, *_BOTH_WAYS})
# In these collectives shapes and dtypes must be equal on every rank. In others they may differ.
_UNIFORM = {"all_reduce", "reduce", "all_reduce_coalesced", "barrier", "all_reduce_barrier"}
# A key of torch's rendezvous of a process group: "/default_pg/0//cpu//<a rank>/<the rank that it waits for>".
_RENDEZVOUS = re.compile(r"//\w+//\d+/(\d+)(?![\w/])")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of all ranks of a job at one moment."""

    living: Mapping[int, RankSnapshot]  # the ranks that have not exited
    exited_ranks: frozenset[int]
    groups: Mapping[str, tuple[int, ...]]
    world_size: int  # 0 if unknown
    spins_for_device: bool  # ranks may keep a core busy while they wait for a device

    @property
    def visible_ranks(self) -> frozenset[int]:
        """The ranks whose state is known, including ranks that have exited."""
        return self.exited_ranks | self.living.keys()

    @property
    def invisible_ranks(self) -> tuple[int, ...]:
        """The ranks whose state is unknown because they are on other nodes or have not started yet."""
        return tuple(sorted(set(range(self.world_size)) - self.visible_ranks))

    def others(self, rank: int) -> tuple[int, ...]:
        """Return all ranks whose state is known, except `rank`."""
        return tuple(sorted(self.visible_ranks - {rank}))


def job_state(
    ranks: Sequence[RankSnapshot],
    exited_ranks: Iterable[int],
    backend: str,
    *,
    world_size: int = 0,
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> JobState:
    """Return the state of a job. `world_size` and `groups` count only if no status file has them."""
    exited = frozenset(exited_ranks)
    status_files = [rank.status_file for rank in ranks if rank.status_file]
    sizes = [status_file.world_size or 0 for status_file in status_files]
    started = (collective.started for rank in ranks for collective in rank.collectives)
    known_backend = job_backend(backend, status_files)
    return JobState(
        living={rank.rank: rank for rank in ranks if rank.rank not in exited},
        exited_ranks=exited,
        groups={
            **(groups or {}),
            **{
                name: members for status_file in status_files for name, members in status_file.groups.items() if members
            },
        },
        world_size=max(sizes, default=world_size),
        # Only NCCL's recorder records whether a collective has started. This identifies NCCL if the backend is unknown.
        spins_for_device="nccl" in known_backend
        or (known_backend != "gloo" and any(value is not None for value in started)),
    )


def job_backend(declared: str, status_files: Iterable[StatusFile]) -> str:
    """Return the job's backend: "gloo" or "nccl" as declared, or else what the ranks report."""
    reported = next((status_file.backend for status_file in status_files if status_file.backend), "")
    return declared if declared in ("gloo", "nccl") else reported or declared


def group_wait(
    rank: RankSnapshot, stack: Stack | None, job: JobState, *, computes: bool, still: bool = True
) -> WaitState | None:
    """Return the rank's wait for other ranks, or None if it does not wait for other ranks."""
    frames = stack.frames if stack else ()
    if computes and not (job.spins_for_device and _spins_for_device(frames, stack, still)):
        return None
    wait_kind = native_wait(stack) if stack else None
    if rank.status_file is None and wait_kind is NativeWait.STORE:
        others = job.others(rank.rank)
        return WaitState(kind=WaitKind.STORE, peers=others, is_closed=bool(others) and not job.invisible_ranks)
    inside = bool(frames) and (_is_inside(frames[0]) or wait_kind is NativeWait.WORK)
    call = _open_call(rank)
    if call is not None and (inside or not frames) and (wait := _unrecorded_wait(rank, call, job)):
        return wait
    return _collective(rank, frames, call, job, inside=inside, computes=computes)


def _is_inside(leaf: Frame) -> bool:
    return (_TORCH_DISTRIBUTED in leaf.file and _CHECKPOINT not in leaf.file) or in_probe(leaf.file)


def _spins_for_device(frames: Sequence[Frame], stack: Stack | None, still: bool) -> bool:
    """Return whether a busy thread only waits for a device: in a collective, a synchronization or backward."""
    if stack is None or not frames:
        return True
    leaf = frames[0]
    if _is_inside(leaf) or leaf.function == "_engine_run_backward":
        return True
    return native_wait(stack) in (NativeWait.DEVICE, NativeWait.WORK) or (still and not stack.gil)


def _open_call(rank: RankSnapshot) -> Call | None:
    """Return the distributed call that the rank is inside, or None if it is in none."""
    if rank.status_file is None:
        stack = rank_stack(rank)
        return call_of_stack(stack) if stack else None
    return next((call for call in reversed(rank.status_file.calls) if call.left_s is None), None)


def call_of_stack(stack: Stack) -> Call | None:
    """Return the call that the thread is in, including its root or peer, or None if the stack does not show them."""
    stack_call = group_call(stack.frames)
    if stack_call is None or not stack.arguments:
        return None
    peer = next((stack.arguments[name] for name in ("src", "dst") if name in stack.arguments), None)
    return Call(
        number=0,
        op=stack_call.text,
        group="",
        place=None,
        elements=0,
        dtype="",
        step=0,
        entered_s=0.0,
        left_s=None,
        peer=peer,
    )


def _unrecorded_wait(rank: RankSnapshot, call: Call, job: JobState) -> WaitState | None:
    """Return the wait in a group creation, transfer or store call, which the recorder lacks, otherwise None."""
    if call.op == ENTRANCE or call.op in CREATIONS:
        return _creation(rank, call, job)
    if operation(call) in TRANSFERS:
        return _transfer(rank.rank, call, job)
    return _store_wait(rank.rank, call, job) if call.key else None


def operation(call: Call) -> str:
    """Return the operation of a call or, for a wait on an asynchronous handle, the operation that is awaited."""
    return call.op.removeprefix(protocol.WAIT)


def _creation(rank: RankSnapshot, call: Call, job: JobState) -> WaitState:
    """Return the rank's wait in `init_process_group` or `new_group` for ranks that have not called it."""
    key_rank = missing_rank(call.key)
    kinds = frozenset({ENTRANCE}) if call.op == ENTRANCE else CREATIONS
    ahead_of = {other: _calls_ahead(rank, job.living.get(other), kinds) for other in job.others(rank.rank)}
    absent = [other for other, (ahead, _) in ahead_of.items() if ahead < 0] if key_rank is None else [key_rank]
    absent += [other for other in job.invisible_ranks if other not in absent]
    if not absent and call.op != ENTRANCE:
        # These ranks have finished the call that this rank is in, and are inside a later one.
        absent = [other for other, (ahead, inside) in ahead_of.items() if ahead > 0 and inside]
    if call.op == ENTRANCE and job.world_size:
        absent += range(job.world_size, call.elements)  # the call names more ranks than were started
    if not absent:
        return _transport(rank.rank, job.others(rank.rank), call=call)
    return _wait_for_ranks(WaitKind.GROUP_CREATION, absent, job, call=call)


def _calls_ahead(rank: RankSnapshot, peer: RankSnapshot | None, kinds: frozenset[str]) -> tuple[int, bool]:
    """Return by how many calls of these kinds the peer is ahead, and whether it is inside one.

    If calls were overwritten, 0 means that the peer may be in the same call, and -1 that it has not entered it. A peer
    without a status file counts as one call behind.
    """
    if peer is None or peer.status_file is None or rank.status_file is None:
        return -1, False
    peer_call = _open_call(peer)
    inside = peer_call is not None and peer_call.op in kinds
    if not _has_lost_calls(peer.status_file) and not _has_lost_calls(rank.status_file):
        return _count(peer.status_file, kinds) - _count(rank.status_file, kinds), inside
    # init_process_group is every rank's first call. A peer inside a call of that kind counts as being in the same call.
    has_entered = inside or (kinds == {ENTRANCE} and _has_lost_calls(peer.status_file))
    return (0 if has_entered else -1), inside


def _has_lost_calls(status_file: StatusFile) -> bool:
    """Return whether a rank's oldest calls have been overwritten in its status file."""
    return bool(status_file.calls) and status_file.calls[0].number > 1


def _count(status_file: StatusFile, kinds: frozenset[str]) -> int:
    return sum(call.op in kinds for call in status_file.calls)


def _transfer(rank: int, call: Call, job: JobState) -> WaitState:
    """Return a rank's wait in a transfer with its peer, or without a source with any other rank."""
    others = job.others(rank)
    peers = others if call.peer is None else (call.peer,)
    if any(_is_other_half(rank, call, job.living[peer]) for peer in peers if peer in job.living):
        return _transport(rank, peers, call=call)
    return _wait_for_ranks(WaitKind.POINT_TO_POINT, peers, job, call=call)


def _is_other_half(rank: int, call: Call, peer: RankSnapshot) -> bool:
    """Return whether `peer` is inside the send or receive that matches `call` on `rank`."""
    peer_call = _open_call(peer)
    if peer_call is None or peer_call.peer not in (rank, None) or operation(peer_call) not in TRANSFERS:
        return False
    operations = (operation(call), operation(peer_call))
    if _BOTH_WAYS.intersection(operations) or sum(op in _SENDS for op in operations) == 1:
        return True
    # Both send. This can complete if the partner has also called irecv, which needs no further call.
    peer_calls = () if peer.status_file is None else peer.status_file.calls
    has_irecv = any(call.op == "irecv" and call.peer in (rank, None) for call in peer_calls)
    return all(op in _SENDS for op in operations) and has_irecv


def _store_wait(rank: int, call: Call, job: JobState) -> WaitState:
    """Return a rank's wait for a store key: of the missing rank that it names, or of any rank."""
    key_rank = missing_rank(call.key)
    if key_rank is not None:
        return _wait_for_ranks(WaitKind.GROUP_CREATION, (key_rank,), job, call=call)
    others = job.others(rank)
    if job.invisible_ranks or not others:
        return WaitState(kind=WaitKind.STORE, peers=(), is_closed=False, call=call)
    return _wait_for_ranks(WaitKind.STORE, others, job, call=call)


def missing_rank(key: str) -> int | None:
    """Return the rank in a rendezvous key such as "/default_pg/0//cpu//0/1", or in a message with one, or None."""
    match = _RENDEZVOUS.search(key)
    return int(match[1]) if match else None


def _wait_for_ranks(kind: WaitKind, peers: Iterable[int], job: JobState, *, call: Call) -> WaitState:
    """Create the state of a wait for other ranks.

    The wait is closed if the state of one of them is known: that rank's own wait then decides whether it can end. It is
    also closed if none of them exists, because their numbers are not below the world size.
    """
    peers = tuple(sorted(peers))
    none_exists = bool(job.world_size) and not job.invisible_ranks and all(peer >= job.world_size for peer in peers)
    is_closed = bool(peers) and (none_exists or any(peer in job.visible_ranks for peer in peers))
    return WaitState(kind=kind, peers=peers, is_closed=is_closed, call=call)


def _transport(
    rank: int, peers: Iterable[int], *, collective: Collective | None = None, call: Call | None = None
) -> WaitState:
    """Create a wait in a call that all ranks have entered but that has not completed."""
    others = tuple(peer for peer in peers if peer != rank)
    return WaitState(kind=WaitKind.TRANSPORT, peers=others, is_closed=False, collective=collective, call=call)


def _collective(
    rank: RankSnapshot, frames: Sequence[Frame], call: Call | None, job: JobState, *, inside: bool, computes: bool
) -> WaitState | None:
    """Return the wait in a collective that others have not entered, or None. `inside`: it is in torch.distributed."""
    pending = next((collective for collective in rank.collectives if not collective.retired), None)
    in_engine = bool(frames) and frames[0].function == "_engine_run_backward"
    others = job.others(rank.rank)
    if pending is None:
        # Without a probe only the stack shows the collective. DDP waits inside the autograd engine.
        stack_call = group_call(frames) if rank.status_file is None and not computes else None
        if not (inside or stack_call or (call is not None and not frames)):
            return None
        if stack_call and stack_call.op in TRANSFERS:
            return WaitState(kind=WaitKind.POINT_TO_POINT, peers=others, is_closed=bool(others))
        return WaitState(kind=WaitKind.COLLECTIVE, peers=others, is_closed=bool(others), call=call)
    absent, unknown = _missing_members(pending, rank.rank, job)
    absent = tuple(sorted({*absent, *_ranks_with_another_root(rank.rank, call, job)}))
    # Outside of torch.distributed the rank may wait on an asynchronous handle, or be doing something else entirely.
    is_outside = bool(frames) and not inside and not in_engine
    if is_outside and not absent and not (computes and job.spins_for_device):
        return None
    if not absent and not unknown:
        members = job.groups.get(pending.group, others)
        return _transport(rank.rank, members, collective=pending, call=call)
    return WaitState(
        kind=WaitKind.COLLECTIVE, peers=absent or unknown, is_closed=bool(absent), collective=pending, call=call
    )


def _ranks_with_another_root(rank: int, call: Call | None, job: JobState) -> tuple[int, ...]:
    """Return the ranks that are in the same collective as `rank` but use a different root rank."""
    if call is None or call.peer is None or operation(call) in TRANSFERS:
        return ()
    calls = {peer: other for peer in job.living if peer != rank and (other := _open_call(job.living[peer]))}
    same = {peer: other for peer, other in calls.items() if (other.op, other.group) == (call.op, call.group)}
    return tuple(peer for peer, other in same.items() if other.peer is not None and other.peer != call.peer)


def _missing_members(pending: Collective, rank: int, job: JobState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that have not entered the collective `pending`, and the ranks whose state is unknown."""
    members = job.groups.get(pending.group)
    others = job.others(rank) if members is None else tuple(peer for peer in members if peer != rank)
    lacking = [
        peer
        for peer in others
        if peer in job.living and _has_not_entered(job.living[peer], pending, is_member=members is not None)
    ]
    missing = job.exited_ranks.intersection(others).union(lacking)
    unknown = [peer for peer in (others if members else job.invisible_ranks) if peer not in job.visible_ranks]
    return tuple(sorted(missing)), tuple(unknown)


def _has_not_entered(peer: RankSnapshot, pending: Collective, *, is_member: bool) -> bool:
    """Return whether the peer, a member for sure if `is_member`, has not entered the collective."""
    if not peer.collectives and peer.status_file is not None and peer.status_file.enqueued:
        return False  # it has entered collectives, but its recorder could not be read, so nothing is known
    in_group = {collective.seq: collective for collective in peer.collectives if collective.group == pending.group}
    if not in_group and pending.group != "0" and peer.collectives and not is_member:
        return False  # it has entered no call of this group, so it is probably not a member
    same = in_group.get(pending.seq)
    return max(in_group, default=0) < pending.seq or (same is not None and not _matches(pending, same))


def _matches(collective: Collective, other: Collective) -> bool:
    """Return whether the collectives of two ranks are the same call."""
    same_tensors = collective.op not in _UNIFORM or (collective.sizes, collective.dtypes) == (other.sizes, other.dtypes)
    return collective.op == other.op and same_tensors
