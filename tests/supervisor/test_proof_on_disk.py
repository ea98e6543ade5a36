"""A proof made live holds on disk: what is stored, and what is left of it within its bound, proves the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from attempts import ORIGIN, journal, said, spec, started

sys.path.append(str(Path(__file__).parents[1] / "core"))

from builders import LIMITS, board, call, frame, process, rank_snapshot, snapshot, stack, task

from nsa_harness.core.evidence.evidence import Ending, Evidence, RankSnapshot, Snapshot
from nsa_harness.core.evidence.reduced import LEVELS, reduce_evidence
from nsa_harness.core.report import HangKind
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.supervisor.storage import collect as store
from nsa_harness.supervisor.storage.adapters import json_object, json_text
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.watch import Snapshots

PROBE = frame(30, file="/venv/site-packages/nsa_harness/probe/beat.py", function="beat")
WAIT = frame(320, file="/usr/lib/python3.11/threading.py", function="wait")


@dataclass
class Film:
    """A camera that shows these looks, and the ranks in them."""

    looks: list[Snapshot]
    living_pids: dict[int, int]
    exited_ranks: set[int] = field(default_factory=set)
    pipe_requests: dict[int, object] = field(default_factory=dict)

    @property
    def sampler(self) -> Film:
        return self

    def take(self, *_: object, **__: object) -> Snapshot:
        return self.looks.pop(0)

    def last_progress_s(self) -> float:
        return 5.0


def stored(looks: Sequence[Snapshot], path: Path) -> tuple[HangKind | None, Evidence]:
    """What the watcher proves of the looks, and the evidence it leaves."""
    alive = {rank.rank: rank.pid for rank in looks[-1].ranks}
    attempt, records = AttemptDir(path), [ORIGIN]
    snapshots = Snapshots(
        ranks=Film(list(looks), alive),
        backend="gloo",
        write=lambda event, **facts: records.append(said(event, 1.0, **facts)),
    )
    for _ in looks:
        snapshots.take()
    proof = snapshots.proof(LIMITS)
    attempt.dumps.mkdir()
    for one in snapshots.snapshots_to_store(Ending.STALL):
        (attempt.dumps / f"snapshot{one.number}.json").write_text(json_text(one))
    records += [said("rank", rank=rank, pid=pid) for rank, pid in alive.items()]
    records += [said("limits", **json_object(LIMITS)), said("ending", 20.0, ending="stall", last_progress_s=5.0)]
    journal(attempt.watch, *records)
    journal(attempt.processes, started())
    return proof.kind if proof else None, store.collect(attempt, spec(ranks=len(alive)), "node7")


def looks_at(*ranks: RankSnapshot, at_s: Sequence[float]) -> list[Snapshot]:
    return [snapshot(number, one_s, *ranks) for number, one_s in enumerate(at_s, 1)]


def crowd(*threads: tuple[int, Any], **facts: Any) -> RankSnapshot:
    """Rank 0 waits for a lock, beside 200 threads that do, and these: thread and frame, with what each stands in."""
    parked = [task(1000 + number) for number in range(200)]
    tasks = (task(100), *parked, *(task(tid, **facts) for tid, _ in threads))
    deep = [frame(line, file="/home/ada/" + "pool/" * 9 + "work.py") for line in range(12)]
    waiting = [stack(WAIT, *deep, tid=one.tid, thread="worker") for one in parked]
    others = [stack(line, tid=tid, thread="other") for tid, line in threads]
    return rank_snapshot(0, process=process(tasks=tasks), stacks=(stack(frame(7)), *waiting, *others))


def napping(until_s: float, line: int = 9) -> RankSnapshot:
    nap = task(syscall="clock_nanosleep", wakes_at_s=until_s, timed=True)
    return rank_snapshot(0, frame(line), process=process(tasks=(nap,)))


def polls() -> list[Snapshot]:
    """A sleep, a line that it prints now and then, sleeps: for 400 s, seen at the first look in neither."""
    naps = [snapshot(number, 4.0 * number, napping(4.0 * number + 1.0)) for number in range(2, 101)]
    naps[50] = replace(naps[50], ranks=(rank_snapshot(0, frame(10), process=process(io_bytes=40)),))
    naps[51:] = [
        replace(one, ranks=(replace(one.ranks[0], process=replace(one.ranks[0].process, io_bytes=40)),))
        for one in naps[51:]
    ]
    return [snapshot(1, 5.0, rank_snapshot(0, frame(8))), *naps]


def turns(ranks: int) -> list[Snapshot]:
    """Endless loops with a longer body, on many ranks."""

    def spinning(rank: int, turn: int) -> RankSnapshot:
        line = frame(300 + (turn + rank) % 8, file="/usr/lib/python3.11/random.py")
        return rank_snapshot(
            rank,
            process=process(100 + rank, cpu_s=2.0 * turn),
            stacks=(stack(line, frame(30, function="draw"), tid=100 + rank),),
        )

    return [
        snapshot(turn, 2.0 * turn, *(spinning(rank, turn) for rank in range(ranks))) for turn in range(1, 20 * ranks)
    ]


def groups_made() -> list[Snapshot]:
    """Rank 1 has made its groups and is in a further one, rank 0 has not come to it: it waits for a lock."""
    made = [call(number, "new_group") for number in (1, 2)]
    later = [call(number) for number in range(3, 60)]
    within = call(60, "new_group", left_s=None)
    ahead = rank_snapshot(
        1,
        frame(1, file="/x/site-packages/torch/distributed/distributed_c10d.py"),
        status_file=board(calls=(*made, *later, within)),
    )
    return looks_at(rank_snapshot(0, frame(7), status_file=board(calls=(*made, *later))), ahead, at_s=(18.0, 20.0))


def children(count: int) -> list[Snapshot]:
    """Rank 0 waits for its last child, which fills a pipe of its own."""
    others = [process(300 + number, parent=100) for number in range(count)]
    full = task(400, syscall="write", target="pipe:[7]", held_by=(400,))
    busy = [stack(frame(50), tid=4000 + number) for number in range(5)]
    parked = [task(4000 + number) for number in range(5)]
    child = process(400, parent=100, command="python child.py", tasks=(*parked, full))
    waiting = rank_snapshot(
        0,
        frame(7),
        process=process(tasks=(task(syscall="wait4", held_by=(400,)),)),
        children=(*others, child),
        child_stacks={400: (*busy, stack(frame(51), tid=400))},
    )
    return looks_at(waiting, at_s=(18.0, 20.0))


CASES = {
    "a loop that prints now and then, and sleeps": (polls(), HangKind.LIVELOCK),
    "a crowd of threads that all wait": (looks_at(crowd(), at_s=(18.0, 20.0)), HangKind.DEADLOCK),
    "a thread of the probe that is just running": (
        looks_at(crowd((900, PROBE), syscall="running", state="R"), at_s=(18.0, 20.0)),
        HangKind.DEADLOCK,
    ),
    "a crowd with a thread that may act": (
        looks_at(crowd((900, frame(3)), syscall="clock_nanosleep", timed=True), at_s=(318.0, 320.0)),
        HangKind.STARVED,
    ),
    "loops on eight ranks": (turns(8), HangKind.LIVELOCK),
    "a group that one rank makes more": (groups_made(), HangKind.DEADLOCK),
    "the last of many children": (children(40), HangKind.DEADLOCK),
}


TOO_MANY = {"loops on eight ranks", "the last of many children"}  # for the last levels: they are not taken


@pytest.mark.parametrize("case", CASES)
def test_what_was_proven_live_is_proven_by_what_is_stored(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, kind = CASES[case]
    live, seen = stored(looks, tmp_path)
    again = judge(seen)
    assert (live, again.proof and again.proof.kind, again.error) == (kind, kind, None)
    monkeypatch.setattr(store, "MAX_RANK_BYTES", 0)
    least, _ = store.reduce_to_limit(seen)
    proof = judge(least).proof
    assert proof is not None
    assert proof.kind is kind, "reduced as far as can be"
    kinds = [found.kind if (found := judge(reduce_evidence(seen, keep)).proof) else None for keep in LEVELS]
    assert case in TOO_MANY or kinds == [kind] * len(LEVELS)


def test_what_moved_before_a_suspicion_does_not_restart_its_clock_at_a_look_for_the_profile() -> None:
    """The look before for the profile was long ago, and the rank has read since."""
    still = rank_snapshot(0, process=process(io_bytes=900, tasks=(task(syscall="read"),)), stacks=(stack(frame(7)),))
    early = replace(still, process=replace(still.process, io_bytes=10))
    film = [snapshot(0, 1.0, early), *looks_at(still, at_s=(18.0, 20.0)), snapshot(0, 20.5, still)]
    snapshots = Snapshots(ranks=Film(film, {0: 100}), backend="gloo", write=lambda *_, **__: None)
    snapshots.take_profile_snapshot(prefers_heartbeat=True)
    snapshots.take()
    snapshots.take()
    snapshots.take_profile_snapshot(prefers_heartbeat=True)
    assert [one.motion for one in snapshots.samples] == ["unseen", "unseen", "waiting", "waiting"]
