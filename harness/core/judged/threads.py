"""Threads: whether some other thread of a process may still release what one of them waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.core.observed.evidence import Stack
from harness.core.observed.process import Process, Task
from harness.core.observed.stacks import in_function

_LIBRARY_POLLERS = (
    "/harness/probe/",
    "tqdm/_monitor.py",
    "torch/utils/data/_utils/pin_memory.py",
    "multiprocessing/resource_sharer.py",
)
_LIBRARY_THREADS = ("gloo", "pt_", "cuda", "nccl", "jemalloc")
_BLOCKING_IO = {"read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock"}


def could_release(process: Process, stacks: Sequence[Stack], waiting: Stack) -> bool:
    """Some other thread of the process, or another process that shares the lock, may still act."""
    if in_function(waiting.frames, "multiprocessing/synchronize.py") is not None:
        return True
    return another_thread_may_act(process, stacks, waiting)


def another_thread_may_act(process: Process, stacks: Sequence[Stack], waiting: Stack) -> bool:
    """Any thread of this process but the one that waits."""
    tasks = {task.tid: task for task in process.tasks}
    in_python = {stack.tid for stack in stacks if stack.frames}
    native = (task for tid, task in tasks.items() if tid not in in_python)
    python = (stack for stack in stacks if stack is not waiting and stack.frames)
    return any(_may_act(stack, tasks) for stack in python) or any(_natively_busy(task) for task in native)


def is_library(task: Task) -> bool:
    """A thread that torch, gloo or a driver keeps for itself, told by its name."""
    return task.comm.startswith(_LIBRARY_THREADS)


def is_poller(stack: Stack) -> bool:
    """A Python thread that a library, or our own probe, keeps for itself."""
    return any(poller in frame.file for frame in stack.frames for poller in _LIBRARY_POLLERS)


def _natively_busy(task: Task) -> bool:
    """A thread of a C++ library that runs, or stands in a read or write that can end, may be what is waited for.

    One that only polls (epoll, timed waits) is a library's loop: gloo, autograd and allocators all keep some.
    """
    if is_library(task):
        return False
    return task.state in "RD" or task.syscall in _BLOCKING_IO


def _may_act(stack: Stack, tasks: Mapping[int, Task]) -> bool:
    """A thread that does not wait for a lock itself, and is not a library's own poller, may do anything."""
    if is_poller(stack):
        return False
    task = tasks.get(stack.tid) if stack.tid else None
    return task is None or task.syscall != "futex" or task.timed is not False
