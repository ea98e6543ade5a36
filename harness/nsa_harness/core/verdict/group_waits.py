"""Find a rank's wait for other ranks: in a collective, a transfer, a store wait, or the creation of a group."""

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
from nsa_harness.core.evidence.stacks import group_call, in_probe
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.wait import WaitKind, WaitState

_TORCH_DISTRIBUTED = "torch/distributed/"
_CHECKPOINT = "torch/distributed/checkpoint/"  # reads and writes files, which may be slow, and waits for no rank
_DEVICE = ("torch/cuda/__init__.py", "torch/cuda/streams.py")
_SENDS = {"send", "isend", "send_object_list"}
_RECEIVES = {"recv", "irecv", "recv_object_list"}
_BOTH_WAYS = {"batch_isend_irecv"}
TRANSFERS = frozenset({*_SENDS, *_RECEIVES, *_BOTH_WAYS})
# The tensors of these calls must be equal on every rank. Others may differ in size, or hold data on one rank only.
_UNIFORM = {"all_reduce", "reduce", "all_reduce_coalesced", "barrier", "all_reduce_barrier"}
# torch's rendezvous of a process group: "/default_pg/0//cpu//<one rank>/<the rank waited for>".
_RENDEZVOUS = re.compile(r"//\w+//\d+/(\d+)(?![\w/])")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """All ranks at one moment, with the job's process groups and size."""

    living: Mapping[int, RankSnapshot]
    gone: frozenset[int]
    groups: Mapping[str, tuple[int, ...]]
    world_size: int
    spins_for_device: bool  # ranks keep a core busy while they wait for a device

    @property
    def visible_ranks(self) -> frozenset[int]:
        return self.gone | self.living.keys()

    @property
    def invisible_ranks(self) -> tuple[int, ...]:
        """Ranks on other nodes, and ranks that have not started yet. Their state is unknown."""
        return tuple(sorted(set(range(self.world_size)) - self.visible_ranks))

    def others(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(self.visible_ranks - {rank}))


def job_state(
    ranks: Sequence[RankSnapshot],
    gone: Iterable[int],
    backend: str,
    *,
    world_size: int = 0,
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> JobState:
    """Return the state of the job. `world_size` and `groups` are used if no status file has them."""
    left = frozenset(gone)
    status_files = [rank.status_file for rank in ranks if rank.status_file]
    sizes = [status_file.world_size or 0 for status_file in status_files]
    recorded = (collective.started for rank in ranks for collective in rank.collectives)
    known_backend = job_backend(backend, status_files)
    return JobState(
        living={rank.rank: rank for rank in ranks if rank.rank not in left},
        gone=left,
        groups={
            **(groups or {}),
            **{
                name: members for status_file in status_files for name, members in status_file.groups.items() if members
            },
        },
        world_size=max(sizes, default=world_size),
        # Only a device's recorder records what has started, so it identifies a program of unknown backend.
        spins_for_device="nccl" in known_backend
        or (known_backend != "gloo" and any(started is not None for started in recorded)),
    )


def job_backend(asked_for: str, status_files: Iterable[StatusFile]) -> str:
    """Return the backend of the job; if none was requested, the one that the ranks report."""
    reported = next((status_file.backend for status_file in status_files if status_file.backend), "")
    return asked_for if asked_for in ("gloo", "nccl") else reported or asked_for


def group_wait(
    rank: RankSnapshot, stack: Stack | None, job: JobState, *, computes: bool, still: bool = True
) -> WaitState | None:
    """Return the rank's wait for other ranks, or None if it waits for something else or computes.

    The wait is closed if at least one of the peers is visible, so that the peer's own wait decides. `computes` means
    that the thread uses a core, `still` that it is on the same line as before.
    """
    frames = stack.frames if stack else ()
    if computes and not (job.spins_for_device and _spins_for_device(frames, stack, still)):
        return None
    inside = bool(frames) and _is_inside(frames[0])
    call = _open_call(rank)
    if call is not None and (inside or not frames) and (wait := _unrecorded_wait(rank, call, job)):
        return wait
    return _collective(rank, frames, call, job, inside=inside, computes=computes)


def _is_inside(leaf: Frame) -> bool:
    return (_TORCH_DISTRIBUTED in leaf.file and _CHECKPOINT not in leaf.file) or in_probe(leaf.file)


def _spins_for_device(frames: Sequence[Frame], stack: Stack | None, still: bool) -> bool:
    """Whether the thread spins for a device: in a collective, a synchronize, `.item()` or the backward pass."""
    if stack is None or not frames:
        return True
    leaf = frames[0]
    if _is_inside(leaf) or leaf.file.endswith(_DEVICE) or leaf.function == "_engine_run_backward":
        return True
    return any("ynchronize" in function for function in stack.native) or (still and not stack.gil)


def _open_call(rank: RankSnapshot) -> Call | None:
    if rank.status_file is None:
        stack = rank_stack(rank)
        return call_of_stack(stack) if stack else None
    return next((call for call in reversed(rank.status_file.calls) if call.left_s is None), None)


def call_of_stack(stack: Stack) -> Call | None:
    """Return the call with a root or a partner that the thread is in, if the source of the stack shows it."""
    named = group_call(stack.frames)
    if named is None or not stack.arguments:
        return None
    peer = next((stack.arguments[name] for name in ("src", "dst") if name in stack.arguments), None)
    return Call(
        number=0,
        op=named.text,
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
    """Return a wait that the flight recorder does not record; only the call shows for which rank it is."""
    if call.op == ENTRANCE or call.op in CREATIONS:
        return _creation(rank, call, job)
    if operation(call) in TRANSFERS:
        return _transfer(rank.rank, call, job)
    return _store_wait(rank.rank, call, job) if call.key else None


def operation(call: Call) -> str:
    """Return the operation that was called; for a wait on a handle, the operation of the handle."""
    return call.op.removeprefix(protocol.WAIT)


def _creation(rank: RankSnapshot, call: Call, job: JobState) -> WaitState:
    named = missing_rank(call.key)
    kinds = frozenset({ENTRANCE}) if call.op == ENTRANCE else CREATIONS
    ahead_of = {other: _calls_ahead(rank, job.living.get(other), kinds) for other in job.others(rank.rank)}
    absent = [other for other, (ahead, _) in ahead_of.items() if ahead < 0] if named is None else [named]
    absent += [other for other in job.invisible_ranks if other not in absent]
    if not absent and call.op != ENTRANCE:
        # The peer has finished as many calls as this rank has begun, and is inside a later one.
        absent = [other for other, (ahead, inside) in ahead_of.items() if ahead > 0 and inside]
    if call.op == ENTRANCE and job.world_size:
        absent += range(job.world_size, call.elements)  # the call names more ranks than were started
    if not absent:
        return _transport(rank.rank, job.others(rank.rank), call=call)
    return _wait_for_ranks(WaitKind.GROUP_CREATION, absent, job, call=call)


def _calls_ahead(rank: RankSnapshot, peer: RankSnapshot | None, kinds: frozenset[str]) -> tuple[int, bool]:
    """Return how many calls of these kinds the peer is ahead (0 if unknown), and whether it is inside one."""
    if peer is None or peer.status_file is None or rank.status_file is None:
        return -1, False
    within = _open_call(peer)
    inside = within is not None and within.op in kinds
    if not _has_lost_calls(peer.status_file) and not _has_lost_calls(rank.status_file):
        return _count(peer.status_file, kinds) - _count(rank.status_file, kinds), inside
    # The entrance is every rank's first call. A rank inside a call of that kind is taken to be in the same call.
    entered = inside or (kinds == {ENTRANCE} and _has_lost_calls(peer.status_file))
    return (0 if entered else -1), inside


def _has_lost_calls(status_file: StatusFile) -> bool:
    return bool(status_file.calls) and status_file.calls[0].number > 1


def _count(status_file: StatusFile, kinds: frozenset[str]) -> int:
    return sum(call.op in kinds for call in status_file.calls)


def _transfer(rank: int, call: Call, job: JobState) -> WaitState:
    """Return the wait of a transfer. A receive from any rank waits for all other ranks."""
    others = job.others(rank)
    peers = others if call.peer is None else (call.peer,)
    if any(_is_other_half(rank, call, job.living[peer]) for peer in peers if peer in job.living):
        return _transport(rank, peers, call=call)
    return _wait_for_ranks(WaitKind.POINT_TO_POINT, peers, job, call=call)


def _is_other_half(rank: int, call: Call, peer: RankSnapshot) -> bool:
    """Whether the partner is in the other half of this transfer."""
    theirs = _open_call(peer)
    if theirs is None or theirs.peer not in (rank, None) or operation(theirs) not in TRANSFERS:
        return False
    both = (operation(call), operation(theirs))
    if _BOTH_WAYS.intersection(both) or sum(op in _SENDS for op in both) == 1:
        return True
    # Both send. That is fine if the partner has posted a receive, which completes without another call.
    posted = () if peer.status_file is None else peer.status_file.calls
    return all(op in _SENDS for op in both) and any(op.op == "irecv" and op.peer in (rank, None) for op in posted)


def _store_wait(rank: int, call: Call, job: JobState) -> WaitState:
    """Return the wait for a store key. A rendezvous key names one missing rank; other keys may be set by any rank."""
    named = missing_rank(call.key)
    if named is not None:
        return _wait_for_ranks(WaitKind.GROUP_CREATION, (named,), job, call=call)
    others = job.others(rank)
    if job.invisible_ranks or not others:
        return WaitState(kind=WaitKind.STORE, peers=(), closed=False, call=call)
    return _wait_for_ranks(WaitKind.STORE, others, job, call=call)


def missing_rank(key: str) -> int | None:
    """Return the rank that a text's first rendezvous key waits for: the end of "/default_pg/0//cpu//0/1"."""
    match = _RENDEZVOUS.search(key)
    return int(match[1]) if match else None


def _wait_for_ranks(kind: WaitKind, peers: Iterable[int], job: JobState, *, call: Call) -> WaitState:
    """Return the wait for these ranks.

    It is closed if one of them is visible, because then that rank's own wait decides. It is also closed if none of them
    can exist, because all their numbers are beyond the world size.
    """
    awaited = tuple(sorted(peers))
    nobody = bool(job.world_size) and not job.invisible_ranks and all(peer >= job.world_size for peer in awaited)
    closed = bool(awaited) and (nobody or any(peer in job.visible_ranks for peer in awaited))
    return WaitState(kind=kind, peers=awaited, closed=closed, call=call)


def _transport(
    rank: int, peers: Iterable[int], *, collective: Collective | None = None, call: Call | None = None
) -> WaitState:
    others = tuple(peer for peer in peers if peer != rank)
    return WaitState(kind=WaitKind.TRANSPORT, peers=others, closed=False, collective=collective, call=call)


def _collective(
    rank: RankSnapshot, frames: Sequence[Frame], call: Call | None, job: JobState, *, inside: bool, computes: bool
) -> WaitState | None:
    """Return the rank's wait in a collective, for the ranks that have not entered it; None if it is in none."""
    pending = next((collective for collective in rank.collectives if not collective.retired), None)
    in_engine = bool(frames) and frames[0].function == "_engine_run_backward"
    others = job.others(rank.rank)
    if pending is None:
        # Without a probe only the stack shows the collective; DDP waits below the engine of autograd.
        named = group_call(frames) if rank.status_file is None and not computes else None
        if not (inside or named or (call is not None and not frames)):
            return None
        if named and named.op in TRANSFERS:
            return WaitState(kind=WaitKind.POINT_TO_POINT, peers=others, closed=bool(others))
        return WaitState(kind=WaitKind.COLLECTIVE, peers=others, closed=bool(others), call=call)
    absent, unseen = _missing_members(pending, rank.rank, job)
    absent = tuple(sorted({*absent, *_ranks_with_another_root(rank.rank, call, job)}))
    handle = bool(frames) and not inside and not in_engine  # the user's own `work.wait()`, or something else entirely
    if handle and not absent and not (computes and job.spins_for_device):
        return None
    if not absent and not unseen:
        members = job.groups.get(pending.group, others)
        return _transport(rank.rank, members, collective=pending, call=call)
    return WaitState(
        kind=WaitKind.COLLECTIVE, peers=absent or unseen, closed=bool(absent), collective=pending, call=call
    )


def _ranks_with_another_root(rank: int, call: Call | None, job: JobState) -> tuple[int, ...]:
    """Return ranks in the same rooted collective that name another root: their call pairs with no other."""
    if call is None or call.peer is None or operation(call) in TRANSFERS:
        return ()
    opened = {peer: theirs for peer in job.living if peer != rank and (theirs := _open_call(job.living[peer]))}
    same = {peer: theirs for peer, theirs in opened.items() if (theirs.op, theirs.group) == (call.op, call.group)}
    return tuple(peer for peer, theirs in same.items() if theirs.peer is not None and theirs.peer != call.peer)


def _missing_members(pending: Collective, rank: int, job: JobState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members that have not entered `pending` or entered another call instead, and the invisible members."""
    members = job.groups.get(pending.group)
    others = job.others(rank) if members is None else tuple(peer for peer in members if peer != rank)
    seen = (peer for peer in others if peer in job.living)
    lacking = [peer for peer in seen if _has_not_entered(job.living[peer], pending, certain=members is not None)]
    missing = job.gone.intersection(others).union(lacking)
    unseen = [peer for peer in (others if members else job.invisible_ranks) if peer not in job.visible_ranks]
    return tuple(sorted(missing)), tuple(unseen)


def _has_not_entered(peer: RankSnapshot, pending: Collective, *, certain: bool) -> bool:
    """Whether the peer has not entered the collective, according to its recorder."""
    if not peer.collectives and peer.status_file is not None and peer.status_file.enqueued:
        return False  # it has entered collectives, but its recorder could not be read, so nothing is known
    in_group = {collective.seq: collective for collective in peer.collectives if collective.group == pending.group}
    if not in_group and pending.group != "0" and peer.collectives and not certain:
        return False  # not a member of this group, as far as the evidence shows
    same = in_group.get(pending.seq)
    return max(in_group, default=0) < pending.seq or (same is not None and not _matches(pending, same))


def _matches(collective: Collective, other: Collective) -> bool:
    same_tensors = collective.op not in _UNIFORM or (collective.sizes, collective.dtypes) == (other.sizes, other.dtypes)
    return collective.op == other.op and same_tensors
