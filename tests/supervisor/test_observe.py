"""Whether an observed job ended because somebody asked it to, and whether it has started its ranks anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_harness.supervisor.observe.observed_job import failed_on_request
from nsa_harness.supervisor.observe.ranks import WatchedRanks

S = 10**9


@pytest.mark.parametrize(("status", "after_s", "asked"), [(-15, 1, True), (1, 60, True), (1, 61, False), (0, 1, False)])
def test_a_bad_end_within_a_minute_of_the_signal_is_what_was_asked_for(status: int, after_s: int, asked: bool) -> None:
    assert failed_on_request(status, 100 * S, (100 + after_s) * S) is asked


# Starts a process for each line it reads, and prints its number; an empty line ends the oldest.
STARTER = """
import subprocess, sys
children = []
for line in sys.stdin:
    if line.strip():
        children.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]))
        print(children[-1].pid, flush=True)
    else:
        oldest = children.pop(0)
        oldest.kill()
        print(oldest.wait(), flush=True)
for child in children:
    child.kill()
"""


class Starter:
    """A process that starts and ends others, as an agent does or a program of the user's own."""

    def __init__(self, script: Path) -> None:
        script.write_text(STARTER)
        words = [sys.executable, str(script)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _ask(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self) -> int:
        return self._ask("one more")

    def end_oldest(self) -> None:
        self._ask("")


@pytest.fixture
def starters(tmp_path: Path) -> Iterator[Callable[[str], Starter]]:
    made: list[Starter] = []

    def make(name: str) -> Starter:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Starter(folder / name))
        return made[-1]

    yield make
    for one in made:
        one.process.communicate()


class Ranks(WatchedRanks):
    """With boards that nobody wrote: process -> rank; None as rank for one that would be rank 0 of itself."""

    def seen(self, boards: dict[int, int | None]) -> list[tuple[int, int]]:
        self.shown = {
            pid: SimpleNamespace(rank=0 if rank is None else rank, world_size=1 if rank is None else 2)
            for pid, rank in boards.items()
        }
        return self.discover(0)

    def _read_status_files(self) -> Any:
        return iter(self.shown.items())


@pytest.fixture
def ranks() -> Ranks:
    unused: Any = None
    guarded: Any = SimpleNamespace(send_command=lambda **_: None)
    return Ranks(spec=unused, job=guarded, sampler=unused)


def test_ranks_that_the_same_agent_started_in_the_place_of_all_set_the_ones_before_aside(
    ranks: Ranks, starters: Callable[[str], Starter]
) -> None:
    agent = starters("torchrun")
    first, second = agent.start(), agent.start()
    assert ranks.seen({first: 0, second: 1}) == [(0, first), (1, second)]
    agent.end_oldest()
    third = agent.start()
    assert (ranks.seen({second: 1, third: 0}), ranks.has_restarted) == ([], False)  # rank 1 is still the one that was
    agent.end_oldest()
    assert (ranks.seen({third: 0}), ranks.has_restarted, ranks.restarted_by_agent) == ([], True, True)


@pytest.mark.parametrize("names", [("train.py", None), ("torchrun", "torchrun")])
def test_ranks_that_a_program_or_another_agent_started_set_nothing_aside(
    ranks: Ranks, starters: Callable[[str], Starter], names: tuple[str, str | None]
) -> None:
    before = starters(names[0])
    after = starters(names[1]) if names[1] else before
    ranks.seen({before.start(): 0})
    before.end_oldest()
    ranks.seen({after.start(): 0})
    assert (ranks.has_restarted, ranks.restarted_by_agent) == (True, False)


def test_who_started_ranks_is_no_rank_once_they_have_left(ranks: Ranks, starters: Callable[[str], Starter]) -> None:
    parent = starters("train.py")
    started = parent.process.pid
    assert ranks.seen({started: None}) == [(0, started)]
    first, second = parent.start(), parent.start()
    assert ranks.seen({started: None, first: 0, second: 1}) == [(0, first), (1, second)]
    parent.end_oldest()
    parent.end_oldest()
    assert (ranks.seen({started: None}), ranks.has_restarted) == ([], False)
    assert ranks.pids == {0: first, 1: second}
