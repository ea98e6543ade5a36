"""Watches one launched run until it ends, or is proven to move no more, or meets its deadline.

Everything seen goes to the journal as it is seen. The watcher decides with the same pure functions as the judge, so a
stored run is judged again to the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.core.judged.limits import in_force
from harness.core.judged.motion import motion, rank_stack
from harness.core.judged.proof import SETTLE_S, prove
from harness.core.observed.evidence import Ending, RankSnapshot, Sample, Snapshot
from harness.core.observed.live import Progress
from harness.core.observed.stacks import user_frame
from harness.core.plan import Limits, RunSpec
from harness.supervisor.adapters import json_text, plain
from harness.supervisor.dump import Camera
from harness.supervisor.launch import Guarded
from harness.supervisor.ranks import Ranks
from harness.supervisor.rundir import AttemptDir, append_line, write_document

_LOOK_S = 0.2  # between two looks at the boards
_MEMORY_S = 1.0
_RANKS_AFTER_LAUNCHER_S = 1.0  # a rank that outlives its launcher for longer than this does not end by itself
_PROFILE_LOOKS, _PROFILE_S = 8, 0.25  # where a run stands that is still there at its deadline
_LOOKS_PER_BUSY = 24.0
_KEPT_SNAPSHOTS = 40


class Audience(Protocol):
    """Who wants to know while it happens."""

    def phase(self, progress: Progress) -> None: ...
    def suspect(self, text: str) -> None: ...
    def released(self, text: str) -> None: ...


@dataclass(kw_only=True)
class Watch:
    """One attempt under observation."""

    guarded: Guarded
    spec: RunSpec
    attempt: AttemptDir
    audience: Audience
    interrupted: Callable[[], bool]
    launcher: int | None = None
    launcher_left_s: float | None = None
    failed: str | None = None
    episode: list[Snapshot] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    suspected_at_s: float | None = None
    progress_when_suspected_s: float = 0.0
    grown_s: float = 0.0
    snapshots_taken: int = 0
    trains: bool = False  # every rank has left start-up
    next_look_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.camera = Camera(
            origin_ns=self.guarded.origin_ns, boards=self.guarded.boards, dumps=self.attempt.dumps.resolve()
        )
        self.ranks = Ranks(spec=self.spec, guarded=self.guarded, camera=self.camera)
        self._write("origin", origin_ns=self.guarded.origin_ns)

    def run(self) -> Ending:
        """Watch until the end, and say why it ended. The processes are still there, except after EXITED."""
        while True:
            for event in self.guarded.events(_LOOK_S):
                self._hear(event)
            ending = self._look()
            if ending is not None:
                self._close(ending)
                return ending

    def _look(self) -> Ending | None:
        now_s = self._now_s()
        if self.failed is not None:
            return Ending.NOT_LAUNCHED
        if self._over(now_s):
            return Ending.EXITED
        self._discover()
        self.ranks.read_boards(now_s)
        if self._due("memory", now_s, _MEMORY_S):
            self.ranks.read_memory()
        if self.interrupted():
            self._snapshot()
            return Ending.INTERRUPTED
        self.audience.phase(self.ranks.progress(now_s))
        self._note_start()
        limits = self.limits
        if limits.deadline_s is not None and now_s >= limits.deadline_s:
            self._profile()
            return Ending.DEADLINE
        return self._suspicion(now_s, limits)

    @property
    def limits(self) -> Limits:
        living = [board for rank, board in self.ranks.boards.items() if rank not in self.ranks.gone]
        return in_force(self.spec.limits, living or self.ranks.boards.values(), self.grown_s)

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self.guarded.origin_ns) / 1e9

    def _due(self, what: str, now_s: float, every_s: float) -> bool:
        if now_s < self.next_look_s.get(what, 0.0):
            return False
        self.next_look_s[what] = now_s + every_s
        return True

    # What the guardian says, and what the processes show.

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = event["pid"]
        elif event["event"] == "failed":
            self.failed = event["error"]
        elif event["event"] == "exit":
            if event["pid"] == self.launcher:
                self.launcher_left_s = self._now_s()
            self.ranks.left(event["pid"])

    def _over(self, now_s: float) -> bool:
        """The launcher has left, and so have the ranks, or they had their time to follow it."""
        if self.guarded.lost:
            return True
        if self.launcher_left_s is None:
            return False
        return not self.ranks.alive or now_s - self.launcher_left_s > _RANKS_AFTER_LAUNCHER_S

    def _discover(self) -> None:
        if self.launcher is not None:
            for rank, pid in self.ranks.discover(self.launcher):
                self._write("rank", rank=rank, pid=pid)

    def _note_start(self) -> None:
        if not self.trains and self.ranks.all_train:
            self.trains = True
            self._write("started")

    # Suspicion, then proof.

    def _suspicion(self, now_s: float, limits: Limits) -> Ending | None:
        if not self.ranks.alive:
            return None
        progress_s = self.ranks.last_progress_s()
        if self.suspected_at_s is not None and progress_s > self.progress_when_suspected_s:
            self._release(progress_s)
        quiet_s = now_s - progress_s
        limit_s = limits.start_s if self.ranks.some_start else limits.stall_s
        assert limit_s is not None
        if quiet_s < limit_s:
            return None
        if self.suspected_at_s is None:
            self._suspect(now_s, quiet_s, limit_s)
        if not self._due("episode", now_s, self._interval_s(limits)):
            return None
        self._snapshot()
        proof = prove(self.episode, self.samples, last_progress_s=progress_s, limits=limits, gone=self.ranks.gone)
        if proof is None:
            return None
        self._write("proof", kind=str(proof.kind), reason=proof.reason)
        return Ending.STALL

    def _suspect(self, now_s: float, quiet_s: float, limit_s: float) -> None:
        self.suspected_at_s, self.progress_when_suspected_s = now_s, self.ranks.last_progress_s()
        self.episode, self.next_look_s["episode"] = [], now_s
        self._write("suspect", quiet_s=round(quiet_s, 3), limit_s=limit_s)
        self.audience.suspect(f"no rank has moved for {quiet_s:.1f} s (limit {limit_s:.1f} s); taking stacks")

    def _release(self, progress_s: float) -> None:
        """A suspect moved again: the limit grows, so that the same pause is not suspected twice."""
        quiet_s = progress_s - self.progress_when_suspected_s
        self.grown_s = max(self.grown_s, 2 * quiet_s)
        self.suspected_at_s, self.episode = None, []
        self._write("released", quiet_s=round(quiet_s, 3))
        self.audience.released(f"moves again after {quiet_s:.1f} s; not a hang, the limit is {self.grown_s:.1f} s now")

    def _interval_s(self, limits: Limits) -> float:
        """Twice quickly for the proof of a closed wait, then often enough to see a loop's lines."""
        assert limits.busy_s is not None
        assert limits.stall_s is not None
        if len(self.episode) < 2:
            return SETTLE_S
        return min(3.0, max(0.1, (limits.busy_s - limits.stall_s) / _LOOKS_PER_BUSY))

    def _snapshot(self) -> None:
        alive = self.ranks.alive
        if not alive:
            return
        self.snapshots_taken += 1
        snapshot = self.camera.take(self.snapshots_taken, alive)
        before = self.episode[-1] if self.episode else None
        self.episode = [*self.episode[:1], *self.episode[1:][-_KEPT_SNAPSHOTS:], snapshot]
        for rank in snapshot.ranks:
            self._sample(before, rank, snapshot.at_s)

    def _sample(self, before: Snapshot | None, rank: RankSnapshot, at_s: float) -> None:
        earlier = next((one for one in before.ranks if one.rank == rank.rank), None) if before else None
        stack = rank_stack(rank)
        frames = stack.frames if stack else ()
        sample = Sample(
            rank=rank.rank,
            at_s=at_s,
            motion=str(motion(earlier, rank, max(at_s - before.at_s, 1e-3))) if before else "unseen",
            leaf=frames[0] if frames else None,
            user=user_frame(frames),
            cpu_s=rank.process.cpu_s if rank.process else None,
        )
        self.samples.append(sample)
        self._write("sample", **plain(sample))

    def _profile(self) -> None:
        """A run that is still there at its deadline: look several times, so that the line where the time goes shows."""
        for _ in range(_PROFILE_LOOKS):
            self._snapshot()
            for event in self.guarded.events(_PROFILE_S):
                self._hear(event)

    # The end.

    def _close(self, ending: Ending) -> None:
        """Everything the judge will need and that only the watcher knows."""
        kept = [*self.episode[:1], *self.episode[1:][-2:]]
        if ending is Ending.STALL:
            kept = _deciding(self.episode)
        self.attempt.dumps.mkdir(exist_ok=True)
        for snapshot in kept:
            text = json_text(snapshot)
            write_document(self.attempt.dumps / f"snapshot{snapshot.number}.json", text)
        for trouble in self.camera.trouble:
            self._write("trouble", what=trouble.what, why=trouble.why, rank=trouble.rank)
        self._write("peaks", rss_bytes={str(rank): peak for rank, peak in self.ranks.peaks.items()})
        self._write("limits", **plain(self.limits))
        self._write(
            "ending",
            ending=str(ending),
            last_progress_s=self.ranks.last_progress_s(),
            error=self.failed,
        )

    def _write(self, event: str, **facts: Any) -> None:
        append_line(self.attempt.watch, {"event": event, "t_s": round(self._now_s(), 4), **facts})


def _deciding(episode: list[Snapshot]) -> list[Snapshot]:
    """The last look, and the latest one before it that is far enough away to prove that nothing moved."""
    last = episode[-1]
    before = [one for one in episode if last.at_s - one.at_s >= SETTLE_S]
    return [*before[-1:], last]
