"""Packing: nothing is started that does not fit, and everything is started in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.schedule import Load, Room, first_that_fits, free_devices, parallel_runs

LOADS = st.builds(Load, ranks=st.integers(1, 8), gpus=st.integers(0, 4), memory_bytes=st.integers(0, 100))
LIMIT = st.none() | st.integers(1, 16)
ROOMS = st.builds(Room, jobs=LIMIT, cores=LIMIT, gpus=st.integers(0, 8), memory_bytes=st.none() | st.integers(0, 300))


@given(st.lists(LOADS, max_size=12), ROOMS)
def test_everything_runs_once_and_never_more_than_there_is_room_for(waiting: list[Load], room: Room) -> None:
    left, running, started = list(waiting), [], 0
    while left or running:
        place = first_that_fits(left, running, room)
        if place is None:
            running.pop(0)
            continue
        running.append(left.pop(place))
        started += 1
        assert len(running) == 1 or _within(running, room)
    assert started == len(waiting)


def _within(running: list[Load], room: Room) -> bool:
    return (
        (room.jobs is None or len(running) <= room.jobs)
        and (room.cores is None or sum(load.ranks for load in running) <= room.cores)
        and sum(load.gpus for load in running) <= room.gpus
        and (room.memory_bytes is None or sum(load.memory_bytes for load in running) <= room.memory_bytes)
    )


def test_a_small_run_goes_past_a_large_one_that_must_wait() -> None:
    large, small = Load(ranks=8, gpus=0, memory_bytes=1), Load(ranks=1, gpus=0, memory_bytes=1)
    room = Room(jobs=None, cores=4, gpus=0, memory_bytes=None)
    assert first_that_fits([large, small], [small], room) == 1
    assert first_that_fits([large, small], [], room) == 0


@given(st.sets(st.integers(0, 7)), st.integers(1, 8))
def test_devices_are_given_to_one_run_at_a_time(taken: set[int], count: int) -> None:
    devices = free_devices(taken, count, 8)
    if len(taken) + count <= 8:
        assert len(devices) == count
        assert taken.isdisjoint(devices)
    else:
        assert devices == tuple(range(8))


@pytest.mark.parametrize(
    ("jobs", "ranks", "gpus", "rank_bytes", "held"),
    [
        (4, 2, 0, 10, (4, "")),
        (5, 2, 0, 10, (4, "cores")),
        (5, 2, 2, 10, (3, "devices")),  # cores are no bound of what has devices
        (5, 2, 0, 20, (2, "memory")),
        (5, 2, 0, 0, (4, "cores")),  # nobody has seen yet what it takes
        (1, 9, 0, 99, (1, "")),  # alone it always fits
        (2, 9, 0, 10, (1, "cores")),
        (None, 2, 0, 10, (4, "cores")),
    ],
)
def test_as_many_alike_runs_fit_side_by_side_as_there_are_cores_or_devices_and_memory_for(
    jobs: int | None, ranks: int, gpus: int, rank_bytes: int, held: tuple[int, str]
) -> None:
    room = Room(jobs=jobs, cores=8, gpus=6, memory_bytes=99)
    assert parallel_runs(Load(ranks=ranks, gpus=gpus, memory_bytes=ranks * rank_bytes), room) == held
