"""The wait of a rank or process: what it waits for, and whether its wait can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.evidence.evidence import Call, Collective, Frame
from nsa_harness.core.verdict.motion import Motion


class WaitKind(StrEnum):
    """The thing that a process waits for, such as a lock, or its activity if it does not wait."""

    COLLECTIVE = "collective"
    POINT_TO_POINT = "point_to_point"
    STORE = "store"  # a key that no rank has set yet
    GROUP_CREATION = "group_creation"  # init_process_group or new_group, which some rank has not entered
    RPC = "rpc"  # the answer of a remote call
    TRANSPORT = "transport"  # every rank is in the same collective or transfer, which does not complete
    LOCK = "lock"
    FILE_LOCK = "file_lock"
    PIPE = "pipe"  # no process that can act has the other end open
    SLEEP = "sleep"
    CHILD = "child"
    LOADER = "loader"  # a worker of a DataLoader
    IO = "io"
    COMPUTE = "compute"
    COMPILE = "compile"  # a compiler runs inside the process
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    NOTHING = "nothing"  # it makes progress


# The kind for a process that does not wait.
KIND_OF_MOTION = {
    Motion.STOPPED: WaitKind.STOPPED,
    Motion.GONE: WaitKind.GONE,
    Motion.MOVING: WaitKind.NOTHING,
    Motion.BURNING: WaitKind.COMPUTE,
}


@dataclass(frozen=True, kw_only=True)
class WaitState:
    """The wait of a rank or of one of its child processes.

    A closed wait (`is_closed`) never ends on its own; at most another rank can end it. `motion` is MOVING if something
    that the process waits for makes progress. It is BURNING if everything it waits for computes on known lines or is in
    a closed wait.
    """

    kind: WaitKind
    motion: Motion = Motion.WAITING
    is_closed: bool = False
    peers: tuple[int, ...] = ()  # the ranks that it waits for
    until_s: float | None = None  # end of its sleep, or of the sleep of the child process that it waits for, if known
    target: str = ""  # the pipe, path or peer address that it waits on; "" for something in its own memory
    collective: Collective | None = None
    call: Call | None = None
    child: ChildWait | None = None  # the child process that it waits for
    computing: tuple[
        ChildWait, ...
    ] = ()  # its threads or child processes that compute, if nothing else can end the wait


@dataclass(frozen=True, kw_only=True)
class ChildWait(WaitState):
    """The state of a child process or thread that a rank waits for."""

    pid: int  # process id; for a thread, the native thread id
    command: str
    thread: str = ""  # name of the thread, if it is a thread of the rank's own process
    leaf: Frame | None  # innermost Python frame
    user_frame: Frame | None  # innermost frame of the user's own code

    @property
    def deepest(self) -> ChildWait:
        """The last of a series of nested waits, in which each child process waits for the next."""
        return self.child.deepest if self.child else self


@dataclass(frozen=True, kw_only=True)
class Wait(WaitState):
    """The wait of one rank, which is a node of the wait-for graph."""

    rank: int
    blocked_in: str  # what it is blocked in, for people: "all_reduce #14"
    leaf: Frame | None = None  # innermost Python frame of the training thread
    user_frame: Frame | None = None  # innermost frame of the user's own code
    in_backward: bool = False  # the training thread is in a backward pass
    debugger: str = ""  # the debugger in which the rank waits for a person, or ""
