"""Which of the waiting runs can start beside those that run: cores, devices and memory, packed in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one run takes of the machine."""

    ranks: int
    gpus: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the machine has for all runs together. None is no limit."""

    jobs: int | None  # runs at the same time
    cores: int | None  # a core for each rank
    gpus: int
    memory_bytes: int | None


def first_that_fits(waiting: Sequence[Load], running: Collection[Load], room: Room) -> int | None:
    """The place in `waiting` of the first run that can start; None to wait. Alone, the first one always can."""
    if not waiting:
        return None
    if not running:
        return 0
    if room.jobs is not None and len(running) >= room.jobs:
        return None
    return next((place for place, load in enumerate(waiting) if _fits([*running, load], room)), None)


def _fits(loads: Sequence[Load], room: Room) -> bool:
    cores = sum(load.ranks for load in loads)
    memory_bytes = sum(load.memory_bytes for load in loads)
    return (
        (room.cores is None or cores <= room.cores)
        and sum(load.gpus for load in loads) <= room.gpus
        and (room.memory_bytes is None or memory_bytes <= room.memory_bytes)
    )


def free_devices(taken: Collection[int], count: int, gpus: int) -> tuple[int, ...]:
    """The first `count` of the `gpus` devices that nobody has taken; all of them when there are not enough."""
    free = tuple(device for device in range(gpus) if device not in taken)[:count]
    return free if len(free) == count else tuple(range(gpus))
