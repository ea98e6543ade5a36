"""A rank that waits for a child process: the cause, the line and the sentence are those of the child's own wait."""

from __future__ import annotations

from typing import Any

import pytest
from builders import diagnose, frame, process, rank_snapshot, stack, stalled, task

from nsa_harness.core.evidence.evidence import Evidence, Frame
from nsa_harness.core.report import Finding
from nsa_harness.core.verdict.verdict import judge

LIBRARY = "/usr/lib/python3.11/"
BARRIER = (
    frame(268, file=f"{LIBRARY}multiprocessing/synchronize.py", function="Condition.wait"),
    frame(697, file=f"{LIBRARY}threading.py", function="Barrier.wait"),
)
QUEUE = (
    frame(395, file=f"{LIBRARY}multiprocessing/connection.py", function="Connection._recv"),
    frame(103, file=f"{LIBRARY}multiprocessing/queues.py", function="Queue.get"),
)
LOCK = (frame(95, file=f"{LIBRARY}multiprocessing/synchronize.py", function="SemLock.__enter__"),)
SEMAPHORE: dict[str, Any] = {"syscall": "futex", "target": "/dev/shm/sem.mp-1", "timed": False, "held_by": ()}
PIPE: dict[str, Any] = {"syscall": "read", "target": "pipe:[8]", "held_by": (100, 300)}


def waiting(lines: tuple[Frame, ...], child_task: dict[str, Any], parent: str) -> Evidence:
    """Rank 0 in line 5, which waits for a child process in line 50, below the library frames `lines`."""
    own = task(syscall=parent, target="pipe:[7]" if parent == "poll" else "", held_by=(300,))
    child = process(300, parent=100, command="python train.py", tasks=(task(300, **child_task),))
    stacks = {300: (stack(*lines, frame(50, function="work"), tid=300),)}
    own_stacks = (stack(frame(5)),)
    rank = rank_snapshot(
        0, process=process(tasks=(own,)), stacks=own_stacks, children=(child,), child_stacks=stacks, proof="d.txt"
    )
    return stalled(rank, at_s=400.0)


def main(seen: Evidence) -> Finding:
    return diagnose(seen, judge(seen)).findings[0]


@pytest.mark.parametrize("parent", ["poll", "wait4"])
@pytest.mark.parametrize(
    ("lines", "child_task", "awaited"),
    [
        (BARRIER, SEMAPHORE, "a process barrier"),
        (QUEUE, PIPE, "an item of a queue"),
        (LOCK, SEMAPHORE, "a lock"),
    ],
    ids=["barrier", "queue", "lock"],
)
def test_the_wait_of_a_child_is_the_cause_of_the_wait_for_it(
    parent: str, lines: tuple[Frame, ...], child_task: dict[str, Any], awaited: str
) -> None:
    found = main(waiting(lines, child_task, parent))
    assert (found.code, found.facts["variant"], found.facts["waits_for"]) == ("lock_cycle", "child", awaited)
    assert found.place is not None
    assert (found.place.line, found.place.function) == (50, "work")
    assert f"for its child process 300 (python train.py), which waits for {awaited} (" in found.claim


def test_a_child_that_reads_anything_but_a_queue_is_blocked_io() -> None:
    assert main(waiting((), {"syscall": "read", "target": "/data/fifo"}, "wait4")).code == "blocked_io"


def test_a_rank_that_waits_for_a_child_whose_queue_it_could_empty_is_at_fault_itself() -> None:
    put = (frame(89, file=f"{LIBRARY}multiprocessing/queues.py", function="Queue.put"),)
    found = main(waiting(put, {**SEMAPHORE, "timed": True, "held_by": None}, "wait4"))
    assert (found.code, found.facts["closed"], found.facts["waits_for"]) == ("lock_cycle", False, "room in a queue")
    assert found.place is not None
    assert found.place.line == 5
