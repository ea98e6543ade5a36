"""Watches one launched run until it ends, or is proven to move no more, or meets its deadline.

Everything seen goes to the journal as it is seen. The watcher decides with the same pure functions as the judge, so a
stored run is judged again to the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from nsa_harness.core.evidence.evidence import Ending, Sample, Snapshot
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.verdict.limits import in_force
from nsa_harness.core.verdict.proof import SETTLE_S, Proof, prove
from nsa_harness.core.verdict.wait_graph import sampled
from nsa_harness.supervisor.capture.node import watch_memory
from nsa_harness.supervisor.capture.snapshot import Camera
from nsa_harness.supervisor.launch.launch import Job
from nsa_harness.supervisor.store.adapters import json_text, plain
from nsa_harness.supervisor.store.rundir import AttemptDir, append_line, write_document
from nsa_harness.supervisor.watch.ranks import Ranks

_LOOK_S = 0.4  # between two looks at the boards, once every rank trains
_CLOSE_LOOKS_S = 0.2  # until then, as a rank may come and go, and while there is a suspicion
_MEMORY_S = 1.0
_RANKS_AFTER_LAUNCHER_S = 1.0  # a rank that outlives its launcher for longer than this does not end by itself
# A run that is still there shortly before its deadline is looked at often, so that the line where the time goes shows.
_PROFILE_S, _PROFILE_SHARE, _PROFILE_EVERY_S = 8.0, 0.25, 0.25  # at most, of the deadline at most, between two looks
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

    guarded: Job
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
    glanced: Snapshot | None = None
    standing: Proof | None = None  # of a job that is left alone: nothing is asked of it until it moves again
    trains: bool = False  # every rank has left start-up
    next_look_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.camera = Camera(
            origin_ns=self.guarded.origin_ns, boards=self.guarded.boards, dumps=self.attempt.dumps.resolve()
        )
        self.ranks = self.find_ranks()
        self.memory = watch_memory()
        self.write("origin", origin_ns=self.guarded.origin_ns)

    def run(self) -> Ending:
        """Watch until the end, and say why it ended. The processes are still there, except after EXITED."""
        while True:
            for event in self.guarded.events(self._wait_s):
                self.hear(event)
            ending = self._look()
            if ending is not None:
                self.close(ending)
                return ending

    @property
    def _wait_s(self) -> float:
        return _LOOK_S if self.trains and self.suspected_at_s is None else _CLOSE_LOOKS_S

    def _look(self) -> Ending | None:
        now_s = self.now_s()
        if self.failed is not None:
            return Ending.NOT_LAUNCHED
        if self._over(now_s):
            return self.over()
        self._discover()
        self.ranks.read_boards(now_s)
        if self.due("memory", now_s, _MEMORY_S):
            self.ranks.read_memory()
        if self.interrupted():
            self.snapshot()
            return Ending.INTERRUPTED
        self.audience.phase(self.ranks.progress(now_s))
        self._note_start()
        limits = self.limits
        if limits.deadline_s is not None and now_s >= limits.deadline_s:
            self.snapshot()
            return self.overdue()
        if limits.deadline_s is not None and now_s >= _profiled_from_s(limits.deadline_s):
            self._glance(now_s)
        return self.suspicion(now_s, limits)

    # What a watch of a job that is not ours does otherwise.

    def find_ranks(self) -> Ranks:
        return Ranks(spec=self.spec, guarded=self.guarded, camera=self.camera)

    def over(self) -> Ending:
        return Ending.EXITED

    def overdue(self) -> Ending | None:
        return Ending.DEADLINE

    def proven(self, _: Proof) -> Ending | None:
        return Ending.STALL

    @property
    def limits(self) -> Limits:
        living = [board for rank, board in self.ranks.boards.items() if rank not in self.ranks.gone]
        return in_force(self.spec.limits, living or self.ranks.boards.values(), self.grown_s)

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.guarded.origin_ns) / 1e9

    def due(self, what: str, now_s: float, every_s: float) -> bool:
        if now_s < self.next_look_s.get(what, 0.0):
            return False
        self.next_look_s[what] = now_s + every_s
        return True

    # What the guardian says, and what the processes show.

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = event["pid"]
        elif event["event"] == "failed":
            self.failed = event["error"]
        elif event["event"] == "exit":
            if event["pid"] == self.launcher:
                self.launcher_left_s = self.now_s()
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
                self.write("rank", rank=rank, pid=pid)

    def _note_start(self) -> None:
        if not self.trains and self.ranks.all_train:
            self.trains = True
            self.write("started")

    # Suspicion, then proof.

    def suspicion(self, now_s: float, limits: Limits) -> Ending | None:
        if not self.ranks.alive:
            return None
        progress_s = self.ranks.last_progress_s()
        if self.suspected_at_s is not None and progress_s > self.progress_when_suspected_s:
            self.release(progress_s)
        if self.standing is not None:
            return None
        quiet_s = now_s - progress_s
        limit_s = limits.start_s if self.ranks.some_start else limits.stall_s
        assert limit_s is not None
        if quiet_s < limit_s:
            return None
        if self.suspected_at_s is None:
            self._suspect(now_s, quiet_s, limit_s)
        if not self.due("episode", now_s, self._interval_s(limits)):
            return None
        self.snapshot()
        proof = prove(
            self.episode,
            self.samples,
            last_progress_s=progress_s,
            limits=limits,
            gone=self.ranks.gone,
            backend=self.spec.backend,
        )
        if proof is None:
            return None
        self.write("proof", kind=str(proof.kind), reason=proof.reason)
        return self.proven(proof)

    def _suspect(self, now_s: float, quiet_s: float, limit_s: float) -> None:
        self.suspected_at_s, self.progress_when_suspected_s = now_s, self.ranks.last_progress_s()
        self.episode, self.next_look_s["episode"] = [], now_s
        self.write("suspect", quiet_s=round(quiet_s, 3), limit_s=limit_s)
        self.audience.suspect(f"no rank has moved for {quiet_s:.1f} s (limit {limit_s:.1f} s); taking stacks")

    def release(self, progress_s: float) -> None:
        """A suspect moved again: the limit grows, so that the same pause is not suspected twice."""
        quiet_s = progress_s - self.progress_when_suspected_s
        self.grown_s = max(self.grown_s, 2 * quiet_s)
        self.suspected_at_s, self.episode = None, []
        self.write("released", quiet_s=round(quiet_s, 3))
        self.audience.released(f"moves again after {quiet_s:.1f} s; not a hang, the limit is {self.grown_s:.1f} s now")

    def _interval_s(self, limits: Limits) -> float:
        """Twice quickly for the proof of a closed wait, then often enough to see a loop's lines."""
        assert limits.busy_s is not None
        assert limits.stall_s is not None
        if len(self.episode) < 2:
            return SETTLE_S
        return min(3.0, max(0.1, (limits.busy_s - limits.stall_s) / _LOOKS_PER_BUSY))

    def snapshot(self) -> None:
        alive = self.ranks.alive
        if not alive:
            return
        self.snapshots_taken += 1
        snapshot = self.camera.take(self.snapshots_taken, alive)
        before = self.episode[-1] if self.episode else None
        self.episode = [*self.episode[:1], *self.episode[1:][-_KEPT_SNAPSHOTS:], snapshot]
        self._take_samples(before, snapshot)

    def _glance(self, now_s: float) -> None:
        """A look for the profile alone: no file is written, and nothing is proven by it."""
        alive = self.ranks.alive
        if not alive or not self.due("profile", now_s, _PROFILE_EVERY_S):
            return
        glance = self.camera.take(0, alive, written=False)
        self._take_samples(self.glanced, glance)
        self.glanced = glance

    def _take_samples(self, before: Snapshot | None, snapshot: Snapshot) -> None:
        for sample in sampled(before, snapshot, self.ranks.gone, self.spec.backend):
            self.samples.append(sample)
            self.write("sample", **plain(sample))

    # The end.

    def close(self, ending: Ending) -> None:
        """Everything the judge will need and that only the watcher knows."""
        kept = [*self.episode[:1], *self.episode[1:][-2:]]
        if ending is Ending.STALL:
            kept = _deciding(self.episode)
        self.attempt.dumps.mkdir(exist_ok=True)
        for snapshot in kept:
            text = json_text(snapshot)
            write_document(self.attempt.dumps / f"snapshot{snapshot.number}.json", text)
        for trouble in self.camera.trouble:
            self.write("trouble", what=trouble.what, why=trouble.why, rank=trouble.rank)
        self.write("memory", **plain(self.memory.ended()))
        self.write("peaks", rss_bytes={str(rank): peak for rank, peak in self.ranks.peaks.items()})
        self.write("limits", **plain(self.limits))
        self.write(
            "ending",
            ending=str(ending),
            last_progress_s=self.ranks.last_progress_s(),
            error=self.failed,
        )

    def write(self, event: str, **facts: Any) -> None:
        append_line(self.attempt.watch, {"event": event, "t_s": round(self.now_s(), 4), **facts})


def _profiled_from_s(deadline_s: float) -> float:
    return deadline_s - min(_PROFILE_S, _PROFILE_SHARE * deadline_s)


def _deciding(episode: list[Snapshot]) -> list[Snapshot]:
    """The last look, the latest one before it that is far enough away to prove that nothing moved, and the first."""
    last = episode[-1]
    before = [one for one in episode if last.at_s - one.at_s >= SETTLE_S]
    return [*(before[:1] if len(before) > 1 else []), *before[-1:], last]
