"""Wait: what a rank is blocked in, for which ranks it waits, and whether the wait can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.evidence.evidence import Call, Collective, Frame
from nsa_harness.core.verdict.motion import Motion


class WaitKind(StrEnum):
    COLLECTIVE = "collective"
    POINT_TO_POINT = "point_to_point"
    STORE = "store"  # a key that no rank has set yet
    GROUP_CREATION = "group_creation"  # init_process_group or new_group, which some rank has not entered
    TRANSPORT = "transport"  # every rank is in the same collective or transfer, and it does not end
    LOCK = "lock"
    FILE_LOCK = "file_lock"
    PIPE = "pipe"  # no process that can act has the other end open
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


# The wait kind of a process that does not wait.
KIND_OF_MOTION = {
    Motion.STOPPED: WaitKind.STOPPED,
    Motion.GONE: WaitKind.GONE,
    Motion.MOVING: WaitKind.NOTHING,
    Motion.BURNING: WaitKind.COMPUTE,
}


@dataclass(frozen=True, kw_only=True)
class WaitState:
    """What a process is blocked in.

    A `closed` wait never ends with time: only another rank can end it. `motion` is MOVING if something that the process
    waits for makes progress, and BURNING if everything it waits for computes on known lines or is in a closed wait.
    """

    kind: WaitKind
    motion: Motion = Motion.WAITING
    closed: bool = False
    peers: tuple[int, ...] = ()  # the ranks it waits for
    until_s: float | None = None  # end of its sleep, or of the sleep of the child it waits for, if known
    target: str = ""  # the pipe, path or peer address that it waits on; "" if that is in its own memory
    collective: Collective | None = None
    call: Call | None = None
    child: ChildWait | None = None  # the process below it that it waits for
    computing: tuple[ChildWait, ...] = ()  # its threads or the processes below it that compute, if nothing else can act


@dataclass(frozen=True, kw_only=True)
class ChildWait(WaitState):
    """What a process below a rank, or another thread of the rank, is blocked in while the rank waits for it."""

    pid: int
    command: str
    thread: str = ""  # name of a thread of the rank's own process; `pid` is then the thread's id
    leaf: Frame | None
    user_frame: Frame | None

    @property
    def deepest(self) -> ChildWait:
        return self.child.deepest if self.child else self


@dataclass(frozen=True, kw_only=True)
class Wait(WaitState):
    """What one rank is blocked in."""

    rank: int
    blocked_in: str
    leaf: Frame | None = None
    user_frame: Frame | None = None
    in_backward: bool = False
    debugger: str = ""  # whose prompt it waits at, or which it waits for somebody to connect to
