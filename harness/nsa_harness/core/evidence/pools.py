"""Pools of processes, as stacks show them: who waits for a result, which worker has a task, who only hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.evidence.stacks import is_standard

_QUEUE = "multiprocessing/queues.py"


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One kind of pool: where a result is waited for, and the loop of its workers."""

    awaited_in: tuple[tuple[str, tuple[str, ...]], ...]  # file, functions
    file: str  # of the workers' loop, and of the threads that hand out tasks
    loop: str


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
    """The kind of pool whose result this thread waits for."""
    return next((pool for pool in _POOLS if any(_within(frames, *one) for one in pool.awaited_in)), None)


def is_worker(pool: Pool, frames: Sequence[Frame]) -> bool:
    return _within(frames, pool.file, (pool.loop,))


def awaits_task(frames: Sequence[Frame]) -> bool:
    """A worker in the queue of tasks, with nothing of the user's below the pool's own loop."""
    loops = (
        number
        for number, one in enumerate(frames)
        if any(one.file.endswith(pool.file) and one.function == pool.loop for pool in _POOLS)
    )
    inner = next(loops, 0)
    return inner > 0 and _within(frames[inner - 1 : inner], _QUEUE, ("get",))


def serves_pool(frames: Sequence[Frame]) -> bool:
    """A thread that hands tasks to workers and takes their results, and runs nothing of anybody else's."""
    hands_on = any(frame.file.endswith(pool.file) for pool in _POOLS for frame in frames)
    return hands_on and all(is_standard(frame.file) for frame in frames)


def _within(frames: Sequence[Frame], file: str, names: Sequence[str]) -> bool:
    """py-spy names a method with its class, faulthandler without."""
    return any(one.file.endswith(file) and one.function.rpartition(".")[2] in names for one in frames)
