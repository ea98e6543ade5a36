"""One wait: what a rank stands in, for whom, and whether it can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.evidence.evidence import Call, Collective, Frame
from nsa_harness.core.verdict.motion import Motion


class WaitKind(StrEnum):
    COLLECTIVE = "collective"
    POINT_TO_POINT = "point_to_point"
    STORE = "store"  # a key that nobody has set yet
    GROUP_CREATION = "group_creation"  # init_process_group or new_group, which some rank has not entered
    TRANSPORT = "transport"  # every rank is in the same collective or transfer, and it does not end
    LOCK = "lock"
    FILE_LOCK = "file_lock"
    PIPE = "pipe"  # the other end is held by nobody who still acts
    SLEEP = "sleep"
    CHILD = "child"
    LOADER = "loader"  # a worker of a DataLoader
    IO = "io"
    COMPUTE = "compute"
    COMPILE = "compile"  # a compiler at work inside the process
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    NOTHING = "nothing"  # it moves


@dataclass(frozen=True, kw_only=True)
class ChildWait:
    """What a process below a rank stands in, where that rank waits for it."""

    pid: int
    command: str
    motion: Motion
    kind: WaitKind
    closed: bool
    until_s: float | None
    leaf: Frame | None
    user: Frame | None
    target: str = ""  # what it waits on, as of a rank
    child: ChildWait | None = None  # the one that it waits for itself
    below: tuple[ChildWait, ...] = ()  # those at the end of such chains that compute

    @property
    def computing(self) -> tuple[ChildWait, ...]:
        """Itself, or those that it waits for."""
        return (self,) if self.kind is WaitKind.COMPUTE else self.below

    @property
    def deepest(self) -> ChildWait:
        return self.child.deepest if self.child else self


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What one rank stands in. `closed`: it cannot come, whatever time passes, unless another rank moves."""

    rank: int
    motion: Motion
    kind: WaitKind
    stands_in: str
    peers: tuple[int, ...]  # the ranks it waits for
    closed: bool
    until_s: float | None  # end of a sleep, its own or that of the child it waits for, where readable
    leaf: Frame | None
    user: Frame | None
    collective: Collective | None
    call: Call | None
    in_backward: bool
    target: str = ""  # what it waits on outside its own memory: a pipe, a path, the address of a peer
    child: ChildWait | None = None  # the process below it that it waits for
    computing: tuple[ChildWait, ...] = ()  # the processes below it that compute, where it waits for nothing else
