"""Determine which other ranks a rank waits for, and in which distributed call."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def visible_ranks(self) -> frozenset[int]:
        """The ranks whose state is known, including ranks that have exited."""
        return self.exited_ranks | self.living.keys()

    @cached_property
    def invisible_ranks(self) -> tuple[int, ...]:
        """The ranks whose state is unknown because they are on other nodes or have not started yet."""
        return tuple(sorted(set(range(self.world_size)) - self.visible_ranks))

    @cached_property
    def _sorted_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.visible_ranks))

    def others(self, rank: int) -> tuple[int, ...]:
        """Return all ranks whose state is known, except `rank`."""
        return without(self._sorted_ranks, rank)

    @cached_property
    def open_calls(self) -> Mapping[int, Call]:
        """The distributed call that each living rank is inside. Ranks that are in none are missing."""
        return {rank: call for rank, snapshot in self.living.items() if (call := _open_call(snapshot)) is not None}

    @cached_property
    def callers_by_root(self) -> Mapping[tuple[str, str], Mapping[int, tuple[int, ...]]]:
        """The ranks in each open call (operation, group) that has a root or peer, by this root or peer."""
        callers: dict[tuple[str, str], dict[int, list[int]]] = {}
        for rank, call in self.open_calls.items():
            if call.peer is not None:
                callers.setdefault((call.op, call.group), {}).setdefault(call.peer, []).append(rank)
        return {key: {root: tuple(ranks) for root, ranks in of.items()} for key, of in callers.items()}

    @cached_property
    def missing_from(self) -> dict[_Entry, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What `_missing_members` has found for each collective, which is the same for all ranks that are in it."""
        return {}

    @cached_property
    def creations(self) -> dict[frozenset[str], Mapping[_CreationState, tuple[int, ...]]]:
        """The ranks in each state of the calls of these kinds, as found by `_ranks_by_creations`."""
        return {}


# A collective as the rank that is in it sees it: group, number, operation, and the tensors if they must be equal.
_Entry = tuple[str, int, str, tuple[tuple[int, ...], ...], tuple[str, ...]]


def without(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return sorted ranks without `rank`; the same object if `rank` is not among them."""
    at = bisect_left(ranks, rank)
    return ranks[:at] + ranks[at + 1 :] if ranks[at : at + 1] == (rank,) else ranks


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
    own = _creation_state(rank, kinds)
    states = [(_calls_ahead(own, state), state, ranks) for state, ranks in _ranks_by_creations(job, kinds).items()]
    behind = [other for ahead, _, ranks in states if ahead < 0 for other in ranks if other != rank.rank]
    absent = behind if key_rank is None else [key_rank]
    absent = [*sorted(absent), *(other for other in job.invisible_ranks if other != key_rank)]
    if not absent and call.op != ENTRANCE:
        # These ranks have finished the call that this rank is in, and are inside a later one.
        absent = [other for ahead, state, ranks in states if ahead > 0 and state.is_inside for other in ranks]
    if call.op == ENTRANCE and job.world_size:
        absent += range(job.world_size, call.elements)  # the call names more ranks than were started
    if not absent:
        return _transport(rank.rank, job.others(rank.rank), call=call)
    return _wait_for_ranks(WaitKind.GROUP_CREATION, absent, job, call=call)


@dataclass(frozen=True)
class _CreationState:
    """What a rank's status file shows about its calls of some kinds. Ranks in the same state are alike."""

    count: int | None  # number of these calls; None = the rank has no status file
    has_lost_calls: bool = False  # the oldest calls were overwritten, so `count` is too small
    is_inside: bool = False  # the rank is inside one of these calls
    has_entered: bool = False  # the rank may be in the same call as a rank that is in one


def _creation_state(rank: RankSnapshot | None, kinds: frozenset[str]) -> _CreationState:
    if rank is None or rank.status_file is None:
        return _CreationState(None)
    call, has_lost_calls = _open_call(rank), _has_lost_calls(rank.status_file)
    is_inside = call is not None and call.op in kinds
    return _CreationState(
        sum(call.op in kinds for call in rank.status_file.calls),
        has_lost_calls=has_lost_calls,
        is_inside=is_inside,
        # init_process_group is every rank's first call. A rank inside such a call counts as being in the same call.
        has_entered=is_inside or (kinds == {ENTRANCE} and has_lost_calls),
    )


def _ranks_by_creations(job: JobState, kinds: frozenset[str]) -> Mapping[_CreationState, tuple[int, ...]]:
    """Return the visible ranks in each state of their calls of these kinds. Ranks that have exited have no state."""
    if kinds not in job.creations:
        ranks: dict[_CreationState, list[int]] = {}
        for rank in sorted(job.visible_ranks):
            ranks.setdefault(_creation_state(job.living.get(rank), kinds), []).append(rank)
        job.creations[kinds] = {state: tuple(alike) for state, alike in ranks.items()}
    return job.creations[kinds]


def _calls_ahead(own: _CreationState, peer: _CreationState) -> int:
    """Return by how many calls a peer is ahead.

    If calls were overwritten, 0 means that the peer may be in the same call, and -1 that it has not entered it. A peer
    without a status file counts as one call behind.
    """
    if peer.count is None or own.count is None:
        return -1
    if not peer.has_lost_calls and not own.has_lost_calls:
        return peer.count - own.count
    return 0 if peer.has_entered else -1


def _has_lost_calls(status_file: StatusFile) -> bool:
    """Return whether a rank's oldest calls have been overwritten in its status file."""
    return bool(status_file.calls) and status_file.calls[0].number > 1


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
    if with_another_root := _ranks_with_another_root(rank.rank, call, job):
        absent = tuple(sorted({*absent, *with_another_root}))
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
    by_root = job.callers_by_root.get((call.op, call.group), {})
    return tuple(peer for root, peers in by_root.items() if root != call.peer for peer in peers if peer != rank)


def _missing_members(pending: Collective, rank: int, job: JobState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that have not entered the collective `pending`, and the ranks whose state is unknown."""
    tensors = (pending.sizes, pending.dtypes) if pending.op in _UNIFORM else ((), ())
    entry = (pending.group, pending.seq, pending.op, *tensors)
    if entry not in job.missing_from:
        job.missing_from[entry] = _missing_from(pending, job)
    missing, unknown = job.missing_from[entry]
    return without(missing, rank), without(unknown, rank)


def _missing_from(pending: Collective, job: JobState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members that have not entered a collective, and those whose state is unknown, both sorted."""
    members = job.groups.get(pending.group)
    candidates = job.visible_ranks if members is None else members
    missing = {
        peer
        for peer in candidates
        if peer in job.exited_ranks
        or (peer in job.living and _has_not_entered(job.living[peer], pending, is_member=members is not None))
    }
    unknown = [peer for peer in (candidates if members else job.invisible_ranks) if peer not in job.visible_ranks]
    return tuple(sorted(missing)), tuple(sorted(unknown))


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
