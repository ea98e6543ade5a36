"""One process of a run as the kernel shows it: its threads, what they wait on, its sockets.

Times are seconds since the launch of the run, on the node's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel thread."""

    tid: int
    comm: str
    state: str  # R S D T t Z as in /proc
    wchan: str
    syscall: str  # "futex", "clock_nanosleep", "read", ... or "running", or "" if unreadable
    wakes_at_s: float | None  # end of a timed sleep or wait, where readable
    timed: bool | None  # the wait has a timeout; None = not readable
    cpu_s: float
    fd: int | None = None  # descriptor of the system call; of a poll the first one
    target: str = ""  # what that is: "pipe:[123]", "socket:[456]", a path; of a shared lock its file; "" if unreadable
    # Living processes that could end this wait: who holds the other end of the pipe, FIFO or socket, or the lock, or is
    # the child waited for. None = it waits for nothing of the kind, or not all could be seen.
    held_by: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Socket:
    """One TCP socket of a process."""

    inode: int
    local: str  # "127.0.0.1:4711"
    peer: str
    state: str  # "ESTABLISHED", "SYN_SENT", ... as the kernel names them
    unacked_bytes: int  # written and not acknowledged by the other side
    unread_bytes: int  # arrived and not read; of a listening socket connections not accepted
    retransmits: int  # of the oldest unacknowledged segment, in a row
    acked_bytes: int | None = None  # over its life; None = the kernel does not let us ask
    received_bytes: int | None = None
    peer_rank: int | None = None  # the other end belongs to this rank, or a child of it
    in_job: bool = False  # the other end belongs to a process of the run, its launcher included


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of the run, ranks and their children alike."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    io_bytes: int | None  # read + written, None = not readable
    rss_bytes: int
    tasks: tuple[Task, ...] = ()
    holds: tuple[str, ...] = ()  # open ends of pipes, FIFOs, sockets: "pipe:[123] w", "/tmp/fifo r", "socket:[456] rw"
    sockets: tuple[Socket, ...] = ()
    traced_by: int | None = None  # the debugger it belongs to at this moment
    frozen: bool = False  # its control group is
