"""Merge what was observed on several nodes of one job into the evidence of the whole job.

Each node has its own clock and its own process ids. The times of a node are moved by a constant, so that all times are
seconds on the clock of the first node. The constant comes from the wall clocks of the nodes, corrected by what the
ranks' calls and the numbered snapshots show about their true order. A proof of a hang does not depend on clocks: see
`merge_snapshots`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nsa_harness.core.evidence.evidence import (
    ENTRANCE,
    Call,
    ChildSample,
    ClockSkew,
    Ending,
    Evidence,
    Exit,
    ProgressEvent,
    RaisedException,
    RankEvidence,
    RankSnapshot,
    Retraction,
    Sample,
    Snapshot,
    Stack,
    StatusFile,
    StepRow,
    StoreKeyWrites,
)
from nsa_harness.core.evidence.flight import drop_incomplete_recorders
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.evidence.host import Gpu, Process, SentSignal, Socket, Task
from nsa_harness.core.evidence.network import Network
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Trouble

PID_SPAN = 1 << 22  # process ids are smaller than this on Linux


def merge(nodes: Mapping[str, Evidence], expected_nodes: int = 0, expected_names: Sequence[str] = ()) -> Evidence:
    """Return the evidence of a job from the evidence of its nodes.

    `expected_nodes`: number of nodes that the job should have, or 0 if this is unknown. `expected_names`: their names,
    or () if they are unknown.
    """
    (first, reference), *others = nodes.items()
    skews = {first: ClockSkew(offset_s=0.0, clock_s=None, error_s=None)}
    skews |= {name: clock_skew(reference, evidence) for name, evidence in others}
    pid_maps = unique_pids({name: _known_pids(evidence) for name, evidence in nodes.items()})
    # The agents of nodes with the same name have a number after it.
    missing = [name for name in expected_names if name not in nodes and len(expected_names) == expected_nodes]
    missing += ["another node"] * max(0, expected_nodes - len(nodes) - len(missing))
    moved = {name: _relocated(evidence, skews[name].offset_s, pid_maps[name], name) for name, evidence in nodes.items()}
    parts = list(moved.values())
    lost = tuple(name for name, part in moved.items() if part.ending is Ending.CONTROLLER_DIED)
    endings = [part.ending for name, part in moved.items() if name not in lost]
    exits = sorted((exit for part in parts for exit in part.exits), key=lambda exit: exit.at_s)
    snapshots, last_progress_s = merge_snapshots(
        [(part.snapshots, part.last_progress_s) for name, part in moved.items() if name not in lost]
    )
    return replace(
        parts[0],
        node=first,
        world_size=max(part.world_size for part in parts),
        backend=next((part.backend for part in parts if part.backend != "any"), "any"),
        ending=_ending(endings),
        limits=merge_limits([part.limits for part in parts]),
        ended_s=max(part.ended_s for part in parts),
        launch_s=_greatest(part.launch_s for part in parts),
        teardown_s=max(part.teardown_s for part in parts),
        launcher=_launcher([part.launcher for part in parts]),
        launcher_error=next((part.launcher_error for part in parts if part.launcher_error), None),
        ranks=_ranks(parts, snapshots[-1].at_s if snapshots and Ending.STALL in endings else None),
        exits=tuple(exits),
        snapshots=snapshots,
        samples=tuple(sorted((sample for part in parts for sample in part.samples), key=lambda sample: sample.at_s)),
        last_progress_s=last_progress_s,
        leftovers=tuple(f"{name}: {text}" for name, part in moved.items() for text in part.leftovers),
        unkillable=_unkillable(moved),
        trouble=tuple(dict.fromkeys(_named(trouble, name) for name, part in moved.items() for trouble in part.trouble)),
        retractions=next((part.retractions for part in parts if part.retractions), ()),
        signals=tuple(signal for part in parts for signal in part.signals),
        disk_full=next((f"{name}: {part.disk_full}" for name, part in moved.items() if part.disk_full), None),
        hiding_file=next((part.hiding_file for part in parts if part.hiding_file), ""),
        last_lines=tuple(line for part in parts for line in part.last_lines),
        memory=None if others else reference.memory,  # the memory of one node says nothing about the others
        network=Network(
            unanswered=tuple(one for part in parts for one in part.network.unanswered),
            unresolved=tuple(dict.fromkeys(one for part in parts for one in part.network.unresolved)),
            links=tuple(link for part in parts for link in part.network.links),
        ),
        nodes={rank.rank: name for name, part in moved.items() for rank in part.ranks if rank.pid and others},
        clocks={name: skew for name, skew in skews.items() if name != first},
        lost_nodes=lost,
        missing_nodes=tuple(missing) if len(nodes) < expected_nodes else (),
    )


def merge_limits(limits: Sequence[Limits]) -> Limits:
    """Return the longest limit of each kind that applies on any node."""
    names = ("stall_s", "busy_s", "open_wait_s", "start_s", "deadline_s")
    return Limits(**{name: _greatest(getattr(one, name) for one in limits) for name in names})


def merge_snapshots(
    nodes: Sequence[tuple[Sequence[Snapshot], float | None]],
) -> tuple[tuple[Snapshot, ...], float | None]:
    """Merge the snapshots with the same number of all nodes, and return them with the time of the job's last progress.

    Each node has its snapshots, and the time of its last progress on the same clock. A number is requested only after
    all nodes have answered the number before, so all snapshots with one number lie before all with the next. The
    result claims no more time than each node measured on its own clock, even if their clocks differ: a merged snapshot
    is as early as the earliest of its parts, and the last progress is the latest of any node.
    """
    asked = [(snapshots, last_s) for snapshots, last_s in nodes if snapshots]
    if not asked:
        return (), _greatest(last_s for _, last_s in nodes)
    numbers = set.intersection(*({snapshot.number for snapshot in snapshots} for snapshots, _ in asked))
    merged: list[Snapshot] = []
    for number in sorted(numbers):
        parts = [snapshot for snapshots, _ in asked for snapshot in snapshots if snapshot.number == number]
        ranks = with_peers(sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.rank))
        merged.append(
            Snapshot(
                number=number,
                at_s=min(part.at_s for part in parts),
                ranks=drop_incomplete_recorders(ranks),
                gpus=tuple(gpu for part in parts for gpu in part.gpus),
                communicators=tuple(communicator for part in parts for communicator in part.communicators),
            )
        )
    return tuple(merged), _greatest(last_s for _, last_s in nodes)


def with_peers(ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
    """Return the ranks with the owner of the other end of each connection to a rank of another node."""
    ends = {
        (socket.local, socket.peer): rank.rank
        for rank in ranks
        for process in (rank.process, *rank.children)
        if process
        for socket in process.sockets
    }

    def known(socket: Socket) -> Socket:
        owner = ends.get((socket.peer, socket.local))
        return socket if owner is None or socket.in_job else replace(socket, peer_rank=owner, in_job=True)

    def with_owners(process: Process) -> Process:
        return replace(process, sockets=tuple(map(known, process.sockets))) if process.sockets else process

    return tuple(
        replace(
            rank,
            process=rank.process and with_owners(rank.process),
            children=tuple(map(with_owners, rank.children)),
        )
        for rank in ranks
    )


def _ranks(parts: Sequence[Evidence], proven_s: float | None) -> tuple[RankEvidence, ...]:
    """Return the evidence of each rank from the node on which its process ran.

    `proven_s`: when the last snapshot of a hang was taken, or None. A rank that raised an exception later, while the
    job was ended, lost its connection to a node that was ended a moment earlier.
    """
    best: dict[int, RankEvidence] = {}
    for part in parts:
        for rank in part.ranks:
            if rank.rank not in best or (rank.pid and not best[rank.rank].pid):
                best[rank.rank] = rank
    ranks = (best[rank] for rank in sorted(best))
    return tuple(replace(rank, exception=None) if _raised_at_end(rank, proven_s) else rank for rank in ranks)


def _raised_at_end(rank: RankEvidence, proven_s: float | None) -> bool:
    if proven_s is None or rank.exception is None or rank.exception.at_s is None:
        return False
    return rank.exception.at_s > proven_s and (rank.exit is None or rank.exit.during_teardown)


def _ending(endings: Sequence[Ending]) -> Ending:
    """Return how the observation of the job ended, which is how it ended on the node that decides its verdict."""
    order = (
        Ending.STALL, Ending.DEADLINE, Ending.DETACHED, Ending.INTERRUPTED, Ending.NOT_LAUNCHED, Ending.RESTARTED,
        Ending.EXITED,
    )  # fmt: skip
    return next((ending for ending in order if ending in endings), Ending.CONTROLLER_DIED)


def _launcher(exits: Sequence[Exit | None]) -> Exit | None:
    """Return the exit of the job's launchers: the first that failed, or the last if all ended well."""
    known = sorted((exit for exit in exits if exit is not None), key=lambda exit: exit.at_s)
    failed = [exit for exit in known if exit.status not in (0, None)]
    unseen = [exit for exit in known if exit.status is None]
    if failed or len(known) < len(exits):
        return failed[0] if failed else None
    return unseen[0] if unseen else known[-1]


def _unkillable(nodes: Mapping[str, Evidence]) -> tuple[str, ...] | None:
    known = {name: part.unkillable for name, part in nodes.items()}
    texts = tuple(f"{name}: {text}" for name, left in known.items() for text in left or ())
    return None if None in known.values() and not texts else texts


def _named(trouble: Trouble, node: str) -> Trouble:
    """Return the trouble with the name of its node, unless it is about a rank, which has a node."""
    return trouble if trouble.rank is not None else replace(trouble, what=f"{trouble.what} ({node})")


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def evidence_of_snapshots(
    node: str,
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    exited_ranks: Iterable[int],
    backend: str,
) -> Evidence:
    """Return evidence that has only the snapshots of a running job's node, and what a proof of a hang needs."""
    last = snapshots[-1].ranks if snapshots else ()
    exits = (Exit(pid=0, rank=rank, status=None, at_s=0.0, during_teardown=False) for rank in exited_ranks)
    return Evidence(
        node=node, world_size=0, backend=backend, ending=Ending.STALL, limits=limits, ended_s=last_progress_s,
        launch_s=None, teardown_s=0.0, launcher=None, launcher_error=None, exits=tuple(exits),
        ranks=tuple(_rank_of_snapshot(rank) for rank in last), snapshots=tuple(snapshots), samples=tuple(samples),
        last_progress_s=last_progress_s, leftovers=(), unkillable=None, metrics={}, trouble=(), is_observed=True,
    )  # fmt: skip


_NO_TRACES = RankTraces(gradient_count=None, missing_count=None, missing_parameters=(), buckets=())


def _rank_of_snapshot(rank: RankSnapshot) -> RankEvidence:
    return RankEvidence(
        rank=rank.rank, pid=rank.pid, exit=None, exception=None, status_file=rank.status_file, collectives=(),
        death_stacks=(), peak_rss_bytes=None, peak_gpu_bytes=None, traces=_NO_TRACES, last_loss=None, error_lines=(),
    )  # fmt: skip


# Clocks.

# No rank leaves one of these calls before every rank has entered it. With NCCL a rank may leave a collective early.
_MEETINGS = frozenset({ENTRANCE, "barrier", "monitored_barrier", "all_gather_object"})
_WORLD = ("", "0")


def clock_skew(reference: Evidence, evidence: Evidence) -> ClockSkew:
    """Return what to add to the times of `evidence` to get times of `reference`.

    The wall clocks of the two nodes give a first estimate. Calls that all ranks must have entered before one leaves
    them, and numbered snapshots, limit the true value. An estimate outside of these limits is corrected.
    """
    zeros = [_wall_clock_at_zero_s(one) for one in (reference, evidence)]
    wall_s = None if zeros[0] is None or zeros[1] is None else zeros[1] - zeros[0]
    lowest, highest = _offset_bounds(reference, evidence)
    is_known = lowest > float("-inf") and highest < float("inf") and lowest <= highest
    if not is_known:
        return ClockSkew(offset_s=wall_s or 0.0, clock_s=None, error_s=None)
    middle = (lowest + highest) / 2
    offset_s = middle if wall_s is None else min(max(wall_s, lowest), highest)
    clock_s = None if wall_s is None else wall_s - middle
    return ClockSkew(offset_s=offset_s, clock_s=clock_s, error_s=(highest - lowest) / 2)


def _wall_clock_at_zero_s(evidence: Evidence) -> float | None:
    files = (rank.status_file for rank in evidence.ranks if rank.status_file)
    return next((file.zero_ns / 1e9 for file in files if file.zero_ns is not None), None)


def _offset_bounds(reference: Evidence, evidence: Evidence) -> tuple[float, float]:
    """Return the lowest and the highest number that may be added to the times of `evidence`."""
    mine, theirs = _meetings(evidence), _meetings(reference)
    orders = [(theirs[key], mine[key]) for key in mine.keys() & theirs.keys()]
    highest = [left - own_entered for (_, left), (own_entered, _) in orders if left is not None]
    lowest = [entered - own_left for (entered, _), (_, own_left) in orders if own_left is not None]
    times = {snapshot.number: snapshot.at_s for snapshot in reference.snapshots}
    own_times = {snapshot.number: snapshot.at_s for snapshot in evidence.snapshots}
    for number, at_s in own_times.items():
        highest += [later_s - at_s for other, later_s in times.items() if other > number]
        lowest += [earlier_s - at_s for other, earlier_s in times.items() if other < number]
    return max(lowest, default=float("-inf")), min(highest, default=float("inf"))


def _meetings(evidence: Evidence) -> dict[tuple[str, int], tuple[float, float | None]]:
    """Return when the node's first rank entered and left each call in which all ranks meet, by call and number.

    The snapshots of a hang count, because the proof on disk must be the proof that was found while the job ran. They
    have the first call, and not all of the later ones.
    """
    shown = evidence.snapshots[0].ranks if evidence.snapshots else evidence.ranks
    files = [rank.status_file for rank in shown if rank.status_file and rank.pid]
    if not files or "nccl" in files[0].backend:
        return {}
    kinds = {ENTRANCE} if evidence.snapshots else _MEETINGS
    calls = [call for call in files[0].calls if call.op in kinds and call.group in _WORLD]
    if files[0].calls and files[0].calls[0].number > 1:
        return {}  # the first calls were overwritten, so the calls of two ranks cannot be matched by their number
    counts: dict[str, int] = {}
    meetings = {}
    for call in calls:
        counts[call.op] = counts.get(call.op, 0) + 1
        meetings[call.op, counts[call.op]] = (call.entered_s, call.left_s)
    return meetings


# Moving the evidence of a node to the clock of the first node, and to process ids of its own.

_TIMES: dict[type, tuple[str, ...]] = {
    ProgressEvent: ("at_s",),
    Call: ("entered_s", "left_s"),
    StoreKeyWrites: ("at_s",),
    StatusFile: ("created_s", "beat_s", "exit_s", "collectives_changed_s", "device_changed_s"),
    Task: ("wakes_at_s",),
    Sample: ("at_s", "wakes_at_s"),
    Snapshot: ("at_s",),
    Exit: ("at_s",),
    RaisedException: ("at_s",),
    StepRow: ("done_s",),
    SentSignal: ("at_s",),
    Retraction: ("at_s",),
    Evidence: ("ended_s", "launch_s", "last_progress_s"),
}
_PARTS: dict[type, tuple[str, ...]] = {
    Evidence: ("ranks", "exits", "snapshots", "samples", "launcher", "retractions", "signals"),
    RankEvidence: ("exit", "exception", "status_file", "ledger"),
    StatusFile: ("events", "calls", "keys_set"),
    Snapshot: ("ranks", "gpus"),
    RankSnapshot: ("process", "children", "stacks", "status_file"),
    Process: ("tasks",),
    Sample: ("child_samples",),
}
_PIDS: dict[type, tuple[str, ...]] = {
    ProgressEvent: ("tid",),
    Call: ("tid",),
    StatusFile: ("pid",),
    Task: ("tid", "held_by"),
    Process: ("pid", "parent", "traced_by"),
    RankSnapshot: ("pid",),
    Stack: ("tid",),
    ChildSample: ("pid",),
    Exit: ("pid",),
    RankEvidence: ("pid",),
    SentSignal: ("pid",),
    Gpu: ("pids",),
}
PidMap = Callable[[int], int]


def relocated(value: Any, offset_s: float, pid_map: PidMap | None) -> Any:
    """Return a copy of evidence, of a part of it, or of a tuple of such parts, with other times and process ids."""
    if isinstance(value, tuple):
        return tuple(relocated(item, offset_s, pid_map) for item in value)
    kind = type(value)
    changes: dict[str, Any] = {
        name: relocated(getattr(value, name), offset_s, pid_map) for name in _PARTS.get(kind, ())
    }
    for name in _TIMES.get(kind, ()) if offset_s else ():
        at_s = getattr(value, name)
        changes[name] = None if at_s is None else at_s + offset_s
    for name in _PIDS.get(kind, ()) if pid_map else ():
        changes[name] = _with_pids(getattr(value, name), pid_map)
    if isinstance(value, StatusFile):
        zero_ns = value.zero_ns
        changes["steps_s"] = tuple((step, at_s + offset_s) for step, at_s in value.steps_s)
        changes["zero_ns"] = None if zero_ns is None else zero_ns - round(offset_s * 1e9)
        if pid_map:
            changes["stopped"] = {pid_map(pid): frames for pid, frames in value.stopped.items()}
    if isinstance(value, RankSnapshot):
        stacks = {pid: relocated(own, offset_s, pid_map) for pid, own in value.child_stacks.items()}
        changes["child_stacks"] = {pid_map(pid) if pid_map else pid: own for pid, own in stacks.items()}
    return replace(value, **changes) if changes else value


def _with_pids(value: Any, pid_map: PidMap | None) -> Any:
    if value is None or pid_map is None:
        return value
    return tuple(map(pid_map, value)) if isinstance(value, tuple) else pid_map(value)


def _relocated(evidence: Evidence, offset_s: float, pid_map: PidMap | None, node: str) -> Evidence:
    moved: Evidence = relocated(evidence, offset_s, pid_map) if offset_s or pid_map else evidence
    snapshots = (
        replace(
            one,
            ranks=with_proof_below(one.ranks, f"nodes/{node}/"),
            gpus=tuple(replace(gpu, node=node) for gpu in one.gpus),
        )
        for one in moved.snapshots
    )
    return replace(moved, snapshots=tuple(snapshots))


def with_proof_below(ranks: Iterable[RankSnapshot], prefix: str) -> tuple[RankSnapshot, ...]:
    """Return the ranks with the paths of their dumps below the directory of their node."""
    return tuple(replace(rank, proof=f"{prefix}{rank.proof}") if rank.proof else rank for rank in ranks)


def _known_pids(evidence: Evidence) -> set[int]:
    pids = {rank.pid for rank in evidence.ranks if rank.pid} | {exit.pid for exit in evidence.exits}
    return pids.union(*(snapshot_pids(snapshot) for snapshot in evidence.snapshots)) - {0}


def snapshot_pids(snapshot: Snapshot) -> set[int]:
    """Return the ids of all processes and threads that a snapshot names."""
    processes = [process for rank in snapshot.ranks for process in (rank.process, *rank.children) if process]
    tasks = [task for process in processes for task in process.tasks]
    held_by = {pid for task in tasks for pid in task.held_by or ()}
    return {process.pid for process in processes} | {task.tid for task in tasks} | held_by


def unique_pids(pids: Mapping[str, set[int]]) -> dict[str, PidMap | None]:
    """Return for each node a function that makes its process ids unique in the job, or None if they already are.

    The ids of a node are changed only if another node has a process with the same id, so that reports show the real
    ids wherever possible.
    """
    maps: dict[str, PidMap | None] = {}
    seen: set[int] = set()
    for number, (node, own) in enumerate(pids.items()):
        maps[node] = _moved_pid(number * PID_SPAN) if seen & own else None
        seen |= own
    return maps


def _moved_pid(distance: int) -> PidMap:
    return lambda pid: pid + distance if 0 < pid < PID_SPAN else pid
