"""What a watch makes of a pause: where it looks early, what it says, what it learns, and what it takes back."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attempts import spec
from builders import board, call, frame, mark, process, rank_snapshot, stack, task

from nsa_harness.core.evidence.evidence import Ending, RankSnapshot, Snapshot, StatusFile
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Trouble
from nsa_harness.core.verdict.limits import has_started, last_progress_s
from nsa_harness.supervisor.observe.observed_job import ObservedJob
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.watch import Watch, WatchPolicy

Boards = Callable[[float], dict[int, StatusFile | None]]  # by rank, at a time


def locked(rank: int) -> RankSnapshot:
    """In a lock that no other thread can release: a closed wait."""
    return rank_snapshot(rank, frame(7, function="take"))


def reading(rank: int) -> RankSnapshot:
    """In a read from a service outside of the job: an open wait."""
    thread = task(100 + rank, syscall="recvfrom", target="socket:[7]")
    return rank_snapshot(
        rank, process=process(100 + rank, tasks=(thread,)), stacks=(stack(frame(9, function="fetch"), tid=100 + rank),)
    )


@dataclass(kw_only=True)
class FakeRanks:
    """Two ranks with scripted boards, which a look shows in the same wait at any time."""

    boards: Boards
    shown: Callable[[int], RankSnapshot] = locked
    shown_early: Callable[[int], RankSnapshot] | None = None  # in the looks that are not stored, if they differ
    now_s: float = 0.0
    living_pids: dict[int, int] = field(default_factory=lambda: {0: 100, 1: 101})
    exited_ranks: set[int] = field(default_factory=set)
    status_files: dict[int, StatusFile | None] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    has_restarted: bool = False
    rank_count: int = 2
    stored_looks: int = 0

    def __post_init__(self) -> None:
        self.pids = dict(self.living_pids)
        self.sampler = SimpleNamespace(take=self.take, pipe_requests={}, last_tasks={}, trouble=[])

    def take(self, number: int, *_: object, writes_dumps: bool = True, **__: object) -> Snapshot:
        self.stored_looks += writes_dumps
        if not writes_dumps:
            self.sampler.trouble.append("the stacks of a rank that starts cannot be read")
        shown = self.shown if writes_dumps else self.shown_early or self.shown
        return Snapshot(number=number, at_s=self.now_s, ranks=tuple(map(shown, self.living_pids)))

    def at(self, now_s: float) -> None:
        self.now_s, self.status_files = now_s, self.boards(now_s)

    @property
    def is_starting(self) -> bool:
        return not all(map(has_started, self.status_files.values()))

    def last_progress_s(self) -> float:
        return max((last_progress_s(file) for file in self.status_files.values() if file), default=0.0)


@dataclass(kw_only=True)
class Audience:
    stalls: list[str] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)

    def report_stall(self, text: str) -> None:
        self.stalls.append(text)

    def report_recovery(self, text: str) -> None:
        self.recoveries.append(text)


def watch_of(ranks: FakeRanks, tmp_path: Path, limits: Limits | None = None) -> tuple[Watch, Audience]:
    policy = WatchPolicy(find_ranks=lambda **_: ranks)  # type: ignore[arg-type, return-value]
    audience: Any = Audience()
    attempt = AttemptDir(tmp_path)
    watch = Watch(
        job=SimpleNamespace(origin_ns=0, probe_dir=tmp_path),  # type: ignore[arg-type]
        spec=spec(limits=limits or Limits()),
        attempt=attempt,
        listener=audience,
        is_interrupted=lambda: False,
        policy=policy,
    )
    return watch, audience


def ended(watch: Watch, ranks: FakeRanks, until_s: float = 400.0, since_s: float = 0.0) -> tuple[Ending | None, float]:
    """Watch every 0.2 s of the ranks' clock until it ends; with the last time that it looked."""
    for tick in range(int(since_s * 5), int(until_s * 5)):
        ranks.at(tick / 5)
        watch._forget_startup()
        if ending := watch.check_stall(ranks.now_s, watch.limits):
            return ending, ranks.now_s
    return None, ranks.now_s


STARTING = board(mark("imported", at_s=3.0))


def both(file: StatusFile) -> Boards:
    return lambda _: {0: file, 1: file}


def test_a_closed_wait_in_start_up_is_proven_within_twenty_seconds(tmp_path: Path) -> None:
    ranks = FakeRanks(boards=both(STARTING))
    watch, audience = watch_of(ranks, tmp_path)
    ending, at_s = ended(watch, ranks)
    assert ending is Ending.STALL
    assert 3.0 + 12.0 < at_s < 3.0 + 20.0
    assert len(audience.stalls) == 1


def test_an_open_wait_in_start_up_is_waited_for_in_silence_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    ranks = FakeRanks(boards=both(STARTING), shown=reading)
    watch, audience = watch_of(ranks, tmp_path, Limits(open_wait_s=4.0))
    assert ended(watch, ranks, 122.8) == (None, 122.6)
    assert (audience.stalls, ranks.stored_looks, ranks.sampler.trouble) == ([], 0, [])
    assert "sample" not in (tmp_path / "watch.jsonl").read_text()
    ending, at_s = ended(watch, ranks, since_s=122.8)
    assert (ending, 123.0 <= at_s <= 126.0) == (Ending.STALL, True)


def test_before_the_limit_no_other_proof_counts_than_that_of_a_closed_wait(tmp_path: Path) -> None:
    ranks = FakeRanks(boards=both(STARTING), shown=reading, shown_early=locked)
    watch, _ = watch_of(ranks, tmp_path, Limits(open_wait_s=4.0))
    ending, at_s = ended(watch, ranks)
    assert (ranks.stored_looks > 2, ending, at_s >= 123.0) == (True, Ending.STALL, True)


@pytest.mark.parametrize(("limits", "least_s"), [(Limits(start_s=60.0), 60.0), (Limits(stall_s=40.0), 40.0)])
def test_a_limit_that_the_user_has_set_is_kept_for_closed_waits_too(
    tmp_path: Path, limits: Limits, least_s: float
) -> None:
    ranks = FakeRanks(boards=both(STARTING))
    watch, _ = watch_of(ranks, tmp_path, limits)
    ending, at_s = ended(watch, ranks)
    assert (ending, at_s >= 3.0 + least_s) == (Ending.STALL, True)


def test_in_a_phase_with_long_pauses_a_closed_wait_needs_no_longer(tmp_path: Path) -> None:
    ranks = FakeRanks(boards=both(board(mark("data", at_s=50.0), gaps_s={"data": 40.0})))
    watch, _ = watch_of(ranks, tmp_path)
    ending, at_s = ended(watch, ranks, since_s=50.0)
    assert watch.limits.stall_s == 120.0
    assert (ending, 62.0 < at_s < 70.0) == (Ending.STALL, True)


def resumes(kind: str, *, paused_s: float = 40.0, later: str, step: int = 1) -> Boards:
    """A pause in one phase, then progress, then a pause in a later phase."""
    first, second = board(mark(kind, at_s=10.0)), board(mark(later, at_s=10.0 + paused_s, step=step))
    return lambda now_s: dict.fromkeys((0, 1), first if now_s < 10.0 + paused_s else second)


@pytest.mark.parametrize(
    ("later", "step", "limit_s"),
    [("data", 1, 80.0), ("forward", 1, 5.0), ("data", 3, 5.0)],
    ids=["in the same phase", "in another phase", "after the first steps"],
)
def test_a_stall_that_is_withdrawn_is_said_and_raises_the_limit_of_its_phase_until_start_up_is_over(
    tmp_path: Path, later: str, step: int, limit_s: float
) -> None:
    ranks = FakeRanks(boards=resumes("data", later=later, step=step), shown=reading)
    watch, audience = watch_of(ranks, tmp_path)
    ended(watch, ranks, 51.0)
    assert len(audience.recoveries) == 1
    assert audience.recoveries[0].startswith("progress again after 40.0 s, so it was no hang")
    ended(watch, ranks, 51.4, 51.0)
    assert watch.limits.stall_s == limit_s


def test_what_was_learned_in_the_first_steps_is_forgotten_after_them(tmp_path: Path) -> None:
    ranks = FakeRanks(boards=resumes("data", later="data"), shown=reading)
    watch, _ = watch_of(ranks, tmp_path)
    ended(watch, ranks, 51.0)
    assert watch.limits.stall_s == 80.0
    ranks.boards = both(board(mark("data", at_s=51.0, step=3)))
    ended(watch, ranks, 51.4, 51.0)
    assert watch.limits.stall_s == 5.0


def test_a_pause_of_start_up_raises_no_limit(tmp_path: Path) -> None:
    first, second = STARTING, board(mark("forward", at_s=140.0))
    ranks = FakeRanks(boards=lambda now_s: dict.fromkeys((0, 1), first if now_s < 140.0 else second), shown=reading)
    watch, audience = watch_of(ranks, tmp_path)
    ended(watch, ranks, 141.0)
    assert (len(audience.stalls) > 0, audience.recoveries) == (
        True,
        ["progress again after 137.0 s, so it was no hang"],
    )
    assert watch.learned_limits_s == {}


def test_pauses_before_the_third_step_raise_no_limit_after_it(tmp_path: Path) -> None:
    def boards(now_s: float) -> dict[int, StatusFile | None]:
        step, pause_s = (1, 40.0) if now_s < 60.0 else (3, 40.0) if now_s < 70.0 else (9, 50.0)
        return dict.fromkeys((0, 1), board(mark("data", at_s=now_s, step=step), gaps_s={"data": pause_s}))

    ranks = FakeRanks(boards=boards)
    watch, _ = watch_of(ranks, tmp_path)
    limits_s = []
    for now_s in (50.0, 61.0, 71.0):
        ended(watch, ranks, now_s + 0.2, now_s)
        limits_s.append((watch.limits.stall_s, watch.limits.open_wait_s))
    assert limits_s == [(120.0, 400.0), (5.0, 300.0), (150.0, 500.0)]


def test_no_stall_is_said_while_a_finished_program_exits_but_a_closed_wait_is_proven(tmp_path: Path) -> None:
    exits = both(board(mark("exit", at_s=10.0), mark("step", at_s=9.0, step=9)))
    ranks = FakeRanks(boards=exits, shown=reading)
    watch, audience = watch_of(ranks, tmp_path)
    ended(watch, ranks, 39.8)
    assert audience.stalls == []
    ended(watch, ranks, 43.0, 39.8)
    assert audience.stalls[0].startswith("no rank has made progress for 30.0 s (limit 30.0 s)")
    (tmp_path / "stuck").mkdir()
    ranks = FakeRanks(boards=exits)
    watch, _ = watch_of(ranks, tmp_path / "stuck")
    ending, at_s = ended(watch, ranks)
    assert (ending, at_s < 30.0) == (Ending.STALL, True)


# A job under `watch` after its HANG was proven and reported.

HUNG = board(mark("forward", at_s=10.0))


@dataclass(kw_only=True)
class Job:
    """An observed job of two ranks that are stuck from second 10 on, and what becomes of it."""

    path: Path
    status: int = 0
    later: StatusFile = HUNG
    from_s: float = 30.0

    def __post_init__(self) -> None:
        self.ranks = FakeRanks(boards=lambda now_s: dict.fromkeys((0, 1), HUNG if now_s < self.from_s else self.later))
        self.audience = Audience()
        self.forwarder = SimpleNamespace(end_request_ns=None)
        command: Any = SimpleNamespace(
            origin_ns=0, probe_dir=self.path, child=SimpleNamespace(wait=lambda: self.status), has_probe=True,
            copy_probe_files=lambda _: None,
        )  # fmt: skip
        self.job = ObservedJob(
            command=command,
            spec=spec(limits=Limits()),
            attempt=AttemptDir(self.path),
            listener=self.audience,  # type: ignore[arg-type]
            forwarder=self.forwarder,  # type: ignore[arg-type]
            on_ending=lambda _: None,
            ends_job=False,
        )
        self.watch = self.job.watch
        self.job.ranks = self.watch.ranks = self.watch.snapshots.ranks = self.ranks  # type: ignore[assignment]

    def runs(self, since_s: float, until_s: float) -> None:
        for tick in range(int(since_s * 5), int(until_s * 5)):
            self.ranks.at(tick / 5)
            assert self.job._decide(self.ranks.now_s, self.watch.limits) is None

    def asked_at(self, at_s: float) -> None:
        self.forwarder.end_request_ns = int(at_s * 1e9)

    def records(self) -> Sequence[str]:
        return [json.loads(line)["event"] for line in (self.path / "watch.jsonl").read_text().splitlines()]


RUNS_ON = board(mark("forward", at_s=30.0))
INTERRUPTED = board(mark("raised", at_s=31.0), ended_by_exception=True)
EXITS = board(mark("exit", at_s=31.0))
DESTROYS = board(mark("collective", at_s=31.0), calls=(call(2, "destroy_process_group", left_s=None),))


@pytest.mark.parametrize(
    ("ending", "ranks"), [(Ending.EXITED, [7]), (Ending.DEADLINE, [0, 7])], ids=["exited", "ended by us"]
)
def test_a_recorder_that_was_refused_is_no_gap_of_a_run_that_has_exited(
    ending: Ending, ranks: list[int], tmp_path: Path
) -> None:
    job = Job(path=tmp_path, later=RUNS_ON)
    job.runs(0.0, 1.0)
    refused = [Trouble(what="flight recorder", why="worker server: 404", rank=rank) for rank in (0, 7)]
    job.watch.ranks.sampler.trouble[:] = refused  # only rank 0 has a status file
    job.watch.close(ending)
    records = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [record["rank"] for record in records if record["event"] == "trouble"] == ranks


def test_a_job_that_runs_on_after_a_proof_takes_it_back(tmp_path: Path) -> None:
    job = Job(path=tmp_path, later=RUNS_ON)
    job.runs(0.0, 30.0)
    assert job.watch.reported_proof is not None
    job.runs(30.0, 31.0)
    assert job.watch.reported_proof is not None  # it may be the `finally` block of a rank that was interrupted
    job.runs(31.0, 33.0)
    assert job.watch.reported_proof is None
    assert job.audience.recoveries[0].startswith("progress again after 20.0 s, so it was no hang")
    assert (job.job._on_exit(), "released" in job.records()) == (Ending.EXITED, True)


@pytest.mark.parametrize("later", [INTERRUPTED, EXITS, DESTROYS])
def test_what_ranks_do_while_they_end_takes_no_proof_back(tmp_path: Path, later: StatusFile) -> None:
    job = Job(path=tmp_path, later=later, status=1)
    job.runs(0.0, 60.0)
    assert (job.job._on_exit(), job.audience.recoveries, "released" in job.records()) == (Ending.STALL, [], False)


@pytest.mark.parametrize("status", [0, 1, -signal.SIGTERM])
def test_what_a_job_does_after_a_signal_takes_no_proof_back(tmp_path: Path, status: int) -> None:
    job = Job(path=tmp_path, later=RUNS_ON, status=status)
    job.runs(0.0, 29.0)
    job.asked_at(29.0)
    job.runs(29.0, 60.0)
    assert (job.job._on_exit(), job.audience.recoveries, "released" in job.records()) == (Ending.STALL, [], False)


def test_what_the_others_do_after_a_rank_has_ended_takes_no_proof_back(tmp_path: Path) -> None:
    job = Job(path=tmp_path, later=RUNS_ON, status=1)
    job.runs(0.0, 29.0)
    del job.ranks.living_pids[0]
    job.runs(29.0, 60.0)
    assert (job.job._on_exit(), job.audience.recoveries) == (Ending.STALL, [])


@pytest.mark.parametrize(
    ("later", "status", "ending"),
    [(RUNS_ON, 0, Ending.EXITED), (EXITS, 0, Ending.EXITED), (RUNS_ON, 1, Ending.STALL), (HUNG, 0, Ending.STALL)],
)
def test_a_job_that_then_ended_well_at_once_was_no_hang(
    tmp_path: Path, later: StatusFile, status: int, ending: Ending
) -> None:
    job = Job(path=tmp_path, later=later, status=status)
    job.runs(0.0, 31.0)
    assert job.job._on_exit() is ending


def test_a_wait_that_begins_after_a_signal_is_no_hang_and_one_from_before_is(tmp_path: Path) -> None:
    job = Job(path=tmp_path, later=HUNG)
    job.asked_at(9.0)
    job.runs(0.0, 60.0)
    assert (job.watch.reported_proof, job.audience.stalls) == (None, [])
    job.asked_at(11.0)
    job.runs(60.0, 70.0)
    assert job.watch.reported_proof is not None
