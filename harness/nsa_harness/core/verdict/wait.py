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


# What a process that does not wait stands in.
OF_MOTION = {
    Motion.STOPPED: WaitKind.STOPPED,
    Motion.GONE: WaitKind.GONE,
    Motion.MOVING: WaitKind.NOTHING,
    Motion.BURNING: WaitKind.COMPUTE,
}


@dataclass(frozen=True, kw_only=True)
class WaitState:
    """What a process stands in. `closed`: it cannot come, whatever time passes, unless another rank moves.

    `motion` is MOVING where somebody who is waited for moves, and BURNING where every process that is waited for
    computes on lines that are known, or stands in a closed wait.
    """

    kind: WaitKind
    motion: Motion = Motion.WAITING
    closed: bool = False
    peers: tuple[int, ...] = ()  # the ranks it waits for
    until_s: float | None = None  # end of a sleep, its own or that of the child it waits for, where readable
    target: str = ""  # what it waits on outside its own memory: a pipe, a path, the address of a peer
    collective: Collective | None = None
    call: Call | None = None
    child: ChildWait | None = None  # the process below it that it waits for
    computing: tuple[ChildWait, ...] = ()  # processes below it, or its threads, where nothing else may act


@dataclass(frozen=True, kw_only=True)
class ChildWait(WaitState):
    """What a process below a rank, or a thread of its own, stands in, where that rank waits for it."""

    pid: int
    command: str
    thread: str = ""  # the name of a thread of the rank's own process, whose number there is `pid`
    leaf: Frame | None
    user: Frame | None

    @property
    def deepest(self) -> ChildWait:
        return self.child.deepest if self.child else self


@dataclass(frozen=True, kw_only=True)
class Wait(WaitState):
    """What one rank stands in."""

    rank: int
    stands_in: str
    leaf: Frame | None = None
    user: Frame | None = None
    in_backward: bool = False
