"""A snapshot of one rank as text: what a person reads first."""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.observed.evidence import RankSnapshot, Stack
from harness.core.observed.process import Process, Socket, Task


def readable(snapshot: RankSnapshot) -> Iterator[str]:
    """The state and what the process waits on, then every Python thread, innermost frame first."""
    process = snapshot.process
    yield f"rank {snapshot.rank}   pid {snapshot.pid}   {process.command if process else 'gone'}"
    if process:
        yield from _state(process)
    if snapshot.board and snapshot.board.newest:
        mark = snapshot.board.newest
        yield f"last mark {mark.kind} {mark.name}   step {mark.step}   at {mark.at_s:.2f} s"
    for child in snapshot.children:
        yield f"child {child.pid}   {child.command}   state {child.state}   cpu {child.cpu_s:.2f} s"
    for stack in snapshot.stacks:
        yield ""
        yield _thread_line(stack)
        yield from (f"    {name}" for name in stack.native)
        yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in stack.frames)
    for collective in snapshot.collectives:
        if not collective.retired:
            yield f"pending {collective.op} #{collective.seq} group {collective.group} sizes {collective.sizes}"


def leaf_line(snapshot: RankSnapshot, stack: Stack | None) -> int | None:
    """The line of the readable dump that shows the innermost Python frame of `stack`."""
    for number, line in enumerate(readable(snapshot), start=1):
        if stack and line == _thread_line(stack):
            return number + len(stack.native) + 1
    return None


def _state(process: Process) -> Iterator[str]:
    main = next((task for task in process.tasks if task.tid == process.pid), None)
    where = f"{main.syscall or '?'} in {main.wchan or '?'}" if main else "?"
    yield f"state {process.state}   {where}   cpu {process.cpu_s:.2f} s   rss {process.rss_bytes >> 20} MiB"
    if process.traced_by is not None:
        yield f"held by the debugger {process.traced_by}"
    if process.frozen:
        yield "its control group is frozen"
    yield from (_wait(task) for task in process.tasks if task.target or task.held_by)
    yield from (_socket(one) for one in process.sockets)


def _wait(task: Task) -> str:
    others = "" if task.held_by is None else f", held by {', '.join(map(str, task.held_by)) or 'nobody'}"
    return f"task {task.tid} in {task.syscall} of {task.target or 'a child'}{others}"


def _socket(one: Socket) -> str:
    owner = "of this run" if one.peer_rank is None else f"rank {one.peer_rank}"
    whose = f" ({owner})" if one.in_job else ""
    carried = "" if one.acked_bytes is None else f"   acknowledged {one.acked_bytes}   received {one.received_bytes}"
    queues = f"unacknowledged {one.unacked_bytes}   unread {one.unread_bytes}   retransmits {one.retransmits}"
    return f"socket {one.local} -> {one.peer}{whose}   {one.state}   {queues}{carried}"


def _thread_line(stack: Stack) -> str:
    state = "active" if stack.active else "idle"
    holds = ", holds the GIL" if stack.gil else ""
    return f"thread {stack.tid or '?'} {stack.thread}   {state}{holds}   ({stack.source})"
