"""Simulate the communication of a training job with a device mesh, up to the moment in which a planted fault stops it.

The job has pipeline, data, expert and tensor parallelism. Every rank executes the statements of PROGRAM; a collective
completes once all members of its group have called it, and a send once the other rank receives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

NS = 1_000_000_000
AXES = ("pp", "dp", "ep", "tp")  # outermost first: neighbouring ranks differ in tp
DEFAULT_GROUP = "0"

PROGRAM = """\
import torch
import torch.distributed as dist
from model import build

mesh, model, optimizer, loader = build()
pp, dp, ep, tp = (mesh.get_group(axis) for axis in mesh.mesh_dim_names)


def attention(hidden, tokens):
    dist.all_reduce(hidden, group=tp)
    dist.all_to_all_single(tokens, tokens, group=ep)
    return hidden, tokens


def train_step(hidden, tokens, gradients, norm):
    if model.previous is not None:
        dist.recv(hidden, src=model.previous)
    hidden, tokens = attention(hidden, tokens)
    if model.next is not None:
        dist.send(hidden, dst=model.next)
        dist.recv(gradients, src=model.next)
    dist.all_reduce(gradients, group=tp)
    if model.previous is not None:
        dist.send(gradients, dst=model.previous)
    if model.has_gradients:
        dist.all_reduce(gradients, group=dp)
    dist.all_reduce(norm)
    optimizer.step()


for step, batch in enumerate(loader):
    train_step(*batch)
"""


class Fault(StrEnum):
    """A fault that the simulator plants on one rank in its last step."""

    SKIPS = "skips"  # the rank does not reduce its gradients over dp
    RAISES = "raises"  # the rank raises an exception before its first collective of the step
    SLOW = "slow"  # the rank computes, and the deadline comes first
    CROSSED = "crossed"  # the rank reduces over all ranks first, and only then over dp


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A device mesh: the size of each axis in AXES. A rank's coordinates are its digits in this mixed radix."""

    sizes: Mapping[str, int]

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        coordinates: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, self.sizes[axis])
        return {axis: coordinates[axis] for axis in AXES}

    def stride(self, axis: str) -> int:
        """Return the distance between two ranks that are neighbours on an axis."""
        return prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :])

    def members(self, axis: str, rank: int) -> range:
        """Return the ranks that differ from `rank` at most on this axis."""
        stride = self.stride(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return range(first, first + self.sizes[axis] * stride, stride)


def mesh_of(world_size: int) -> Mesh:
    """Return a mesh of `world_size` ranks, a power of two, with axes of nearly equal sizes. Raise ValueError if not."""
    factors = world_size.bit_length() - 1
    if world_size != 1 << factors or factors < 1:
        raise ValueError(f"{world_size} ranks: expected a power of two, at least 2")
    order = ("dp", "tp", "pp", "ep")  # the axes that grow first
    return Mesh(sizes={axis: 1 << (factors + 3 - order.index(axis)) // 4 for axis in AXES})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A statement that communicates."""

    op: str
    group: str  # name of the process group
    line: int
    elements: int
    peer: int | None = None  # of a transfer


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One execution of an operation by one rank."""

    operation: Operation
    step: int
    seq: int  # number of the collective in its group; of a transfer, the number among the transfers of the rank
    entered_ns: int  # since the launch
    left_ns: int | None  # None: still inside


@dataclass(kw_only=True)
class SimulatedJob:
    """The calls of every rank of a job until all ranks hang or have ended, and the planted fault."""

    mesh: Mesh
    fault: Fault
    culprit: int
    last_step: int
    groups: dict[str, tuple[int, ...]]  # name of each process group -> its members
    names: list[dict[str, str]]  # of each rank: axis -> name of its group
    calls: list[list[CallRecord]] = field(default_factory=list)  # of each rank, oldest first
    now_ns: list[int] = field(default_factory=list)  # of each rank: the time of its latest progress
    step_ends_ns: list[list[int]] = field(default_factory=list)  # of each rank: when each finished step ended
    operations: int = 0  # simulated executions, of all ranks together

    @property
    def stalled_ns(self) -> int:
        """The time of the latest progress of any rank."""
        return max(self.now_ns)


def line_of(text: str) -> int:
    """Return the number of the line of PROGRAM that contains `text`."""
    return next(number for number, line in enumerate(PROGRAM.splitlines(), start=1) if text in line)


_START_NS = 8 * NS
_COMPUTE_NS = 3_000_000
_TRANSFER_NS = 200_000


def simulate(world_size: int, fault: Fault, *, steps: int, culprit: int | None = None) -> SimulatedJob:
    """Run `steps` complete steps, and then one with the fault on the rank `culprit`, by default one in the middle.

    The cost is proportional to the number of executed operations.
    """
    mesh = mesh_of(world_size)
    groups, names = _groups(mesh)
    job = SimulatedJob(
        mesh=mesh,
        fault=fault,
        culprit=world_size * 2 // 3 if culprit is None else culprit,
        last_step=steps + 1,
        groups=groups,
        names=names,
        calls=[[] for _ in range(world_size)],
        now_ns=[_START_NS + 1000 * rank for rank in range(world_size)],
        step_ends_ns=[[] for _ in range(world_size)],
    )
    _Execution(job).run()
    return job


def _groups(mesh: Mesh) -> tuple[dict[str, tuple[int, ...]], list[dict[str, str]]]:
    groups: dict[str, tuple[int, ...]] = {DEFAULT_GROUP: tuple(range(mesh.world_size))}
    names: list[dict[str, str]] = [{"world": DEFAULT_GROUP} for _ in range(mesh.world_size)]
    for axis in AXES:
        for rank in range(mesh.world_size):
            if axis not in names[rank]:
                name, members = str(len(groups)), tuple(mesh.members(axis, rank))
                groups[name] = members
                for member in members:
                    names[member][axis] = name
    return groups, names


def step_of(job: SimulatedJob, rank: int, *, is_last: bool) -> list[Operation]:
    """Return the operations of one training step of a rank; in the last step, the culprit's fault changes them."""
    mesh, at = job.mesh, job.mesh.coordinates(rank)
    stride, names = mesh.stride("pp"), job.names[rank]
    previous = rank - stride if at["pp"] > 0 else None
    following = rank + stride if at["pp"] < mesh.sizes["pp"] - 1 else None

    def collective(op: str, axis: str, text: str, elements: int) -> Operation:
        return Operation(op=op, group=names[axis], line=line_of(text), elements=elements)

    def transfer(op: str, peer: int | None, text: str) -> list[Operation]:
        operation = Operation(op=op, group=DEFAULT_GROUP, line=line_of(text), elements=4096, peer=peer)
        return [] if peer is None else [operation]

    end = [
        collective("all_reduce", "dp", "group=dp)", 1 << 20),
        collective("all_reduce", "world", "all_reduce(norm)", 1),
    ]
    if is_last and rank == job.culprit:
        end = {Fault.SKIPS: end[1:], Fault.CROSSED: end[::-1]}.get(job.fault, end)
    return [
        *transfer("recv", previous, "src=model.previous"),
        collective("all_reduce", "tp", "all_reduce(hidden", 4096),
        collective("all_to_all_single", "ep", "all_to_all_single", 2048),
        *transfer("send", following, "dst=model.next"),
        *transfer("recv", following, "src=model.next"),
        collective("all_reduce", "tp", "all_reduce(gradients, group=tp)", 4096),
        *transfer("send", previous, "dst=model.previous"),
        *end,
    ]


class _Execution:
    """Executes the steps of all ranks. Ranks whose next statement can complete are kept in a queue."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self.pending: dict[tuple[str, int], list[int]] = {}  # collective -> the ranks that wait in it
        self.sent: dict[tuple[int, int], int] = {}  # (sender, receiver) -> the rank of the pair that waits
        self.seqs: list[dict[str, int]] = [{} for _ in job.calls]
        self.statements: list[Iterator[tuple[int, Operation | None]]] = [
            self._statements(rank) for rank in range(job.mesh.world_size)
        ]

    def run(self) -> None:
        queue = list(range(self.job.mesh.world_size))
        while queue:
            rank = queue.pop()
            queue += self._advance(rank)

    def _statements(self, rank: int) -> Iterator[tuple[int, Operation | None]]:
        """Yield (step, operation) for each statement, and None as the operation at the end of a step."""
        job = self.job
        routine = step_of(job, rank, is_last=False)
        for step in range(1, job.last_step):
            yield from ((step, operation) for operation in routine)
            yield step, None
        if rank == job.culprit and job.fault in (Fault.RAISES, Fault.SLOW):
            return
        yield from ((job.last_step, operation) for operation in step_of(job, rank, is_last=True))
        yield job.last_step, None

    def _advance(self, rank: int) -> Sequence[int]:
        """Execute the statements of a rank up to its next call. Return the ranks that this call releases."""
        job = self.job
        for step, operation in self.statements[rank]:
            if operation is None:
                job.step_ends_ns[rank].append(job.now_ns[rank])
                continue
            job.operations += 1
            job.now_ns[rank] += _COMPUTE_NS + 1000 * (rank * 7 % 101)
            seqs = self.seqs[rank]
            counted = operation.group if operation.peer is None else "transfers"
            seqs[counted] = seq = seqs.get(counted, 0) + 1
            job.calls[rank].append(
                CallRecord(operation=operation, step=step, seq=seq, entered_ns=job.now_ns[rank], left_ns=None)
            )
            return self._met(rank, operation, seq)
        return ()

    def _met(self, rank: int, operation: Operation, seq: int) -> Sequence[int]:
        if operation.peer is not None:
            pair = (rank, operation.peer) if operation.op == "send" else (operation.peer, rank)
            if self.sent.pop(pair, None) is None:
                self.sent[pair] = rank
                return ()
            return self._release([rank, operation.peer])
        members = self.job.groups[operation.group]
        waiting = self.pending.setdefault((operation.group, seq), [])
        waiting.append(rank)
        if len(waiting) < len(members):
            return ()
        del self.pending[operation.group, seq]
        return self._release(waiting)

    def _release(self, ranks: list[int]) -> list[int]:
        done_ns = max(self.job.now_ns[rank] for rank in ranks) + _TRANSFER_NS
        for rank in ranks:
            self.job.now_ns[rank] = done_ns
            call = self.job.calls[rank][-1]
            self.job.calls[rank][-1] = CallRecord(
                operation=call.operation, step=call.step, seq=call.seq, entered_ns=call.entered_ns, left_ns=done_ns
            )
        return ranks
