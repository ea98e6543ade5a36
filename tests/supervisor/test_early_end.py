"""When a watched run ends: early, where it stands as one did that was proven to hang; and at its deadline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attempts import spec

from nsa_harness.core.evidence.evidence import Ending, Frame, RankSnapshot, Snapshot, Stack
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.plan import Limits
from nsa_harness.core.search.waits import EarlyStop, Waiting, WaitSignature
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run
from nsa_harness.supervisor.watch.watch import Watch, WatchPolicy

LIMITS = Limits(stall_s=2.0, busy_s=60.0, open_wait_s=60.0, start_s=120.0)
QUIET_S = 0.2  # of the good control


def reading(rank: int, line: int, io_bytes: int = 7) -> RankSnapshot:
    pid = 100 + rank
    facts = {"comm": "python", "state": "S", "wchan": "", "wakes_at_s": None, "timed": False}
    own = Task(tid=pid, cpu_s=1.0, syscall="recvfrom", target="socket:[7]", **facts)  # type: ignore[arg-type]
    process = Process(
        pid=pid, parent=1, command="python train.py", state="S", cpu_s=1.0, io_bytes=io_bytes, rss_bytes=1, tasks=(own,)
    )
    frames = (Frame(file="/job/train.py", line=line, function="step"),)
    stack = Stack(thread="MainThread", tid=pid, active=False, frames=frames, source="py-spy")
    return RankSnapshot(rank=rank, pid=pid, process=process, stacks=(stack,))


@dataclass(kw_only=True)
class FakeRanks:
    """Two ranks that were last seen to do anything at second 1. `shown`: what a look shows at each second."""

    shown: Any
    spec: Any = None
    job: Any = None
    sampler: Any = None
    now_s: float = 1.0
    living_pids: dict[int, int] = field(default_factory=lambda: {0: 100, 1: 101})
    pids: dict[int, int] = field(default_factory=lambda: {0: 100, 1: 101})
    exited_ranks: set[int] = field(default_factory=set)
    status_files: dict[int, None] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    is_starting: bool = False
    all_started: bool = False
    has_other_hosts: bool = False

    def __post_init__(self) -> None:
        self.sampler = SimpleNamespace(take=self.take, pipe_requests={}, last_tasks=set(), trouble=[])

    def take(self, number: int, *_: object, **__: object) -> Snapshot:
        return Snapshot(number=number, at_s=self.now_s, ranks=self.shown(self.now_s))

    def last_progress_s(self) -> float:
        return 1.0

    def read_status_files(self, _: float) -> None: ...

    def read_memory(self) -> None: ...

    def progress(self, elapsed_s: float, deadline_s: float | None) -> Progress:
        return Progress(elapsed_s=elapsed_s, deadline_s=deadline_s, ranks=())


def patience(known: set[WaitSignature], quiet_s: float | None = QUIET_S) -> tuple[EarlyStop, list[Waiting | None]]:
    told: list[Waiting | None] = []
    return EarlyStop(
        probe_number=4,
        ranks=2,
        proven_hangs=known,
        longest_gap_s=quiet_s,
        report_wait=lambda _, waiting: told.append(waiting),
    ), told


def watched(attempt: AttemptDir, enough: EarlyStop, shown: Any) -> tuple[Ending | None, float]:
    """Until it ends, or for 200 s, looked at every 0.2 s of a clock of its own."""
    ranks = FakeRanks(shown=shown)
    policy = WatchPolicy(find_ranks=lambda **_: ranks, stops_early=enough)  # type: ignore[arg-type, return-value]
    guarded: Any = SimpleNamespace(origin_ns=0, probe_dir=attempt.path)
    audience: Any = SimpleNamespace(report_stall=lambda _: None, report_recovery=lambda _: None)
    watch = Watch(
        job=guarded, spec=spec(), attempt=attempt, listener=audience, is_interrupted=lambda: False, policy=policy
    )
    for tick in range(5, 1000):
        ranks.now_s = tick / 5
        if ending := watch.check_stall(ranks.now_s, LIMITS):
            return ending, ranks.now_s
    return None, ranks.now_s


def attempts(home: Path) -> Iterator[AttemptDir]:
    run = create_run(home)
    for number in range(1, 9):
        attempt = run.attempt(f"p{number:02d}")
        attempt.path.mkdir()
        yield attempt


def stands(_: float) -> Sequence[RankSnapshot]:
    return (reading(0, 40), reading(1, 13))


def test_the_first_such_wait_is_proven_in_full_the_next_ends_early_and_a_proof_is_never_cut(tmp_path: Path) -> None:
    places = attempts(tmp_path)
    known: set[WaitSignature] = set()
    first, told = patience(known)
    ending, ended_s = watched(next(places), first, stands)
    assert (ending, first.stopped_early) == (Ending.STALL, False)
    assert 61.0 <= ended_s <= 64.0
    assert first.signature is not None
    assert told[-1] is not None
    assert (told[-1].was_proven, told[-1].until_s, told[-1].limit) == (False, 60.0, "open_wait_s")
    known.add(first.signature)
    second, told = patience(known)
    place = next(places)
    ending, ended_s = watched(place, second, stands)
    assert (ending, second.stopped_early) == (Ending.EARLY, True)
    assert 11.0 <= ended_s <= 14.0
    assert told[-1] is not None
    assert (told[-1].was_proven, told[-1].until_s) == (True, 10.0)
    assert "proof" not in [json.loads(line)["event"] for line in place.watch.read_text().splitlines()]
    in_full, _ = patience(known, None)
    assert watched(next(places), in_full, stands)[0] is Ending.STALL


def test_what_stands_elsewhere_or_moves_a_byte_now_and_then_is_waited_for(tmp_path: Path) -> None:
    places = attempts(tmp_path)
    first, _ = patience(set())
    watched(next(places), first, stands)
    assert first.signature is not None
    known = {first.signature}
    elsewhere, _ = patience(known)
    assert watched(next(places), elsewhere, lambda _: (reading(0, 41), reading(1, 13)))[0] is Ending.STALL
    assert not elsewhere.stopped_early
    slow, _ = patience(known)
    assert watched(next(places), slow, lambda now_s: (reading(0, 40), reading(1, 13, int(now_s / 8))))[0] is None
    assert not slow.stopped_early


@pytest.mark.parametrize(
    ("began_s", "observed", "ended_s"),
    [
        (2.0, False, 12.0),
        (8.0, False, 18.0),  # the launcher took longer, and the program has as long as before
        (None, False, 10.0),  # it never leaves start-up
        (8.0, True, 10.0),  # a job of somebody else's: from when it was looked at
    ],
)
def test_a_deadline_counts_from_when_every_rank_has_left_start_up(
    tmp_path: Path, began_s: float | None, observed: bool, ended_s: float
) -> None:
    ranks = FakeRanks(shown=stands)
    policy = WatchPolicy(find_ranks=lambda **_: ranks, decide=lambda *_: None, is_observed=observed)  # type: ignore[arg-type, return-value]
    told: list[Progress] = []
    watch = Watch(
        job=SimpleNamespace(origin_ns=0, probe_dir=tmp_path, is_lost=False),  # type: ignore[arg-type]
        spec=spec(limits=Limits(deadline_s=10.0)),
        attempt=next(attempts(tmp_path)),
        listener=SimpleNamespace(report_progress=told.append),  # type: ignore[arg-type]
        is_interrupted=lambda: False,
        policy=policy,
    )
    watch.now_s = lambda: ranks.now_s  # type: ignore[method-assign]
    ending = None
    while ending is None:
        ranks.now_s += 0.25
        ranks.all_started = began_s is not None and ranks.now_s >= began_s
        ending = watch._poll()
    assert (ending, ranks.now_s, told[-1].deadline_s) == (Ending.DEADLINE, ended_s, ended_s)
    watch.close(ending)
    said = [json.loads(line) for line in watch.attempt.watch.read_text().splitlines()]
    assert next(one["deadline_s"] for one in said if one["event"] == "limits") == 10.0
