"""Recognize threads that wait for a process pool, or work for one, by their call stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.evidence.stacks import is_standard, is_within

_QUEUE = "multiprocessing/queues.py"


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A kind of process pool, such as multiprocessing.Pool."""

    awaited_in: tuple[tuple[str, tuple[str, ...]], ...]  # (file, functions that wait for a result)
    file: str  # file of the worker's loop and of the threads that hand out tasks
    loop: str  # function with the worker's loop


MULTIPROCESSING = Pool(
    awaited_in=(("multiprocessing/pool.py", ("wait", "get", "next", "join")),),
    file="multiprocessing/pool.py",
    loop="worker",
)
EXECUTOR = Pool(
    awaited_in=(
        ("concurrent/futures/_base.py", ("result", "exception", "wait", "as_completed")),
        ("concurrent/futures/process.py", ("shutdown",)),
    ),
    file="concurrent/futures/process.py",
    loop="_process_worker",
)
_POOLS = (MULTIPROCESSING, EXECUTOR)


def awaits_result(frames: Sequence[Frame]) -> Pool | None:
    """Return the kind of process pool whose result the thread is waiting for, or None if there is none."""
    return next((pool for pool in _POOLS if any(is_within(frames, *place) for place in pool.awaited_in)), None)


def is_worker(pool: Pool, frames: Sequence[Frame]) -> bool:
    """Return whether the thread is a worker of this kind of process pool."""
    return is_within(frames, pool.file, (pool.loop,))


def awaits_task(frames: Sequence[Frame]) -> bool:
    """Return whether the thread is a pool worker that is waiting for its next task."""
    loops = (
        number
        for number, frame in enumerate(frames)
        if any(frame.file.endswith(pool.file) and frame.function == pool.loop for pool in _POOLS)
    )
    inner = next(loops, 0)
    return inner > 0 and is_within(frames[inner - 1 : inner], _QUEUE, ("get",))


def serves_pool(frames: Sequence[Frame]) -> bool:
    """Return whether the thread only hands out tasks or collects results for a process pool."""
    hands_on = any(frame.file.endswith(pool.file) for pool in _POOLS for frame in frames)
    return hands_on and all(is_standard(frame.file) for frame in frames)
