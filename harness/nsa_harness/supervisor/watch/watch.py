"""Watches one launched run until it ends, or is proven to move no more, or meets its deadline.

Everything seen goes to the journal as it is seen. The watcher decides with the same pure functions as the judge, so a
stored run is judged again to the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from nsa_harness.core.diagnosis.stall_note import StallNote, early_word
from nsa_harness.core.evidence.evidence import Ending, Sample, Snapshot
from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.verdict.limits import in_force, since_launch
from nsa_harness.core.verdict.proof import SETTLE_S, Proof, prove
from nsa_harness.core.verdict.wait_graph import sampled
from nsa_harness.supervisor.capture.node import MemoryWatch
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.launch.launcher import Watchable
from nsa_harness.supervisor.storage.adapters import json_text, plain
from nsa_harness.supervisor.storage.rundir import AttemptDir, append_line, write_document
from nsa_harness.supervisor.storage.safe_directory import is_full, with_room
from nsa_harness.supervisor.watch.ranks import Ranks

_LOOK_S = 0.4  # between two looks at the boards, once every rank trains
_CLOSE_LOOKS_S = 0.2  # until then, as a rank may come and go, and while there is a suspicion
_MEMORY_S = 1.0
_RANKS_AFTER_LAUNCHER_S = 1.0  # a rank that outlives its launcher for longer than this does not end by itself
# Where the time goes is looked at over the whole run: a look stops a rank for 10 to 30 ms, so they are far apart. A run
# that is too short for many of them, and still there shortly before its deadline, is looked at often then.
_PROFILE_LOOKS, _PROFILE_APART_S = 60, 5.0  # at most, at least
_PROFILE_S, _PROFILE_SHARE, _PROFILE_EVERY_S = 8.0, 0.25, 0.25  # at most, of the deadline at most, between two looks
_LOOKS_PER_BUSY = 24.0
_KEPT_SNAPSHOTS = 40
_QUICK_SNAPSHOTS = 3  # of a suspicion: those that prove a closed wait; the others may take their time
_SAY_AGAIN_S = 30.0  # what has not changed, but for the time that is left


T = TypeVar("T")


class WatchListener(Protocol):
    """Who wants to know while it happens."""

    def phase(self, progress: Progress) -> None: ...
    def looked(self, rows: Sequence[FirstSnapshot]) -> None: ...
    def suspect(self, text: str) -> None: ...
    def released(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class WatchPolicy:
    """How ranks are found, and what follows from what is seen: an ending ends the watch, None lets it go on.

    What stands here is the policy of a run of our own. It ends once its launcher has left, a HANG is proven, or the
    deadline has passed; one of a bisection also where it stands as another one did that was proven to hang.
    """

    find_ranks: Callable[..., Ranks] = Ranks
    over: Callable[[], Ending] = lambda: Ending.EXITED
    overdue: Callable[[], Ending | None] = lambda: Ending.DEADLINE
    proven: Callable[[Proof], Ending | None] = lambda _: Ending.STALL
    enough: Callable[..., bool] = lambda *_, **__: False  # asked where nothing is proven yet, as `prove` is
    decide: Callable[[float, Limits], Ending | None] | None = None  # None: suspicion by the boards, then proof
    observed: bool = False  # the job is not ours
    guarded: bool = True  # a guardian writes down who has left


@dataclass(kw_only=True)
class Snapshots:
    """The snapshots of one attempt, and what they show of it."""

    ranks: Ranks
    backend: str
    write: Callable[..., None]  # to the journal
    episode: list[Snapshot] = field(default_factory=list)  # since the suspicion
    samples: list[Sample] = field(default_factory=list)
    taken: int = 0
    _glanced: Snapshot | None = None

    def take(self) -> None:
        alive = self.ranks.alive
        if not alive:
            return
        self.taken += 1
        snapshot = self.ranks.camera.take(self.taken, alive, patient=len(self.episode) >= _QUICK_SNAPSHOTS)
        for one in self.ranks.camera.piped.values() if self.taken == 1 else ():
            if one.pipe is not None:
                self.write("asked", rank=one.rank, pipe=one.pipe)
        before = self.episode[-1] if self.episode else None
        self.episode = [*self.episode[:1], *self.episode[1:][-_KEPT_SNAPSHOTS:], snapshot]
        self._take_samples(before, snapshot)

    def glance(self, *, patient: bool) -> None:
        """A look for the profile alone: no file is written, and nothing is proven by it. `patient`: as of the camera.

        It tells what moved since the last look of either kind: what moved before a suspicion would restart its clock.
        """
        glance = self.ranks.camera.take(0, self.ranks.alive, written=False, patient=patient)
        before = [one for one in (self._glanced, *self.episode[-1:]) if one is not None]
        self._take_samples(max(before, key=lambda one: one.at_s, default=None), glance)
        self._glanced = glance

    def proof(self, limits: Limits) -> Proof | None:
        """That the run moves no more, written down where there is one."""
        proof = self.asked(prove, limits)
        if proof is not None:
            self.write("proof", kind=str(proof.kind), reason=proof.reason)
        return proof

    def early_word(self, limits: Limits) -> StallNote | None:
        return self.asked(early_word, limits)

    def asked(self, ask: Callable[..., T], limits: Limits) -> T:
        return ask(
            self.episode,
            self.samples,
            last_progress_s=self.ranks.last_progress_s(),
            limits=limits,
            gone=self.ranks.gone,
            backend=self.backend,
        )

    def kept(self, ending: Ending) -> list[Snapshot]:
        """Those that go to disk."""
        return _deciding(self.episode) if ending is Ending.STALL else [*self.episode[:1], *self.episode[1:][-2:]]

    def _take_samples(self, before: Snapshot | None, snapshot: Snapshot) -> None:
        for sample in sampled(before, snapshot, self.ranks.gone, self.backend):
            self.samples.append(sample)
            self.write("sample", **plain(sample))


@dataclass(kw_only=True)
class Watch:
    """One attempt under observation."""

    guarded: Watchable
    spec: RunSpec
    attempt: AttemptDir
    audience: WatchListener
    interrupted: Callable[[], bool]
    policy: WatchPolicy = field(default_factory=WatchPolicy)
    launcher: int | None = None  # its process, when it left and why it could not be started, as the guardian says
    launcher_left_s: float | None = None
    launcher_error: str | None = None
    trains: bool = False  # every rank has left start-up
    began_s: float | None = None  # since when, of a run of our own
    quiet_since_s: float | None = None  # the last progress before the suspicion; None = there is none
    grown_s: float = 0.0
    said_early: tuple[tuple[str, ...], str] | None = None  # of this suspicion
    standing: Proof | None = None  # of a job that is left alone: nothing is asked of it until it moves again
    next_look_s: dict[str, float] = field(default_factory=dict)
    unwritten: list[dict[str, Any]] = field(default_factory=list)  # of the journal: the disk was full

    def __post_init__(self) -> None:
        dumps = self.attempt.dumps.resolve()
        camera = StackSampler(
            origin_ns=self.guarded.origin_ns,
            boards=self.guarded.boards,
            dumps=dumps,
            redaction=self.attempt.redaction,
        )
        self.ranks = self.policy.find_ranks(spec=self.spec, guarded=self.guarded, camera=camera)
        self.snapshots = Snapshots(ranks=self.ranks, backend=self.spec.backend, write=self.write)
        self.memory = MemoryWatch()
        self.write("origin", origin_ns=self.guarded.origin_ns)
        if self.policy.observed:
            self.write("observed")

    def run(self) -> Ending:
        """Watch until the end, and say why it ended. Processes may be there still: the caller ends them."""
        while True:
            for event in self.guarded.events(self._wait_s):
                self._hear(event)
            ending = self._look()
            if ending is None:
                continue
            if not (self.standing and ending is Ending.STALL):  # else it was written when it was proven
                self.close(ending)
            return ending

    @property
    def _wait_s(self) -> float:
        return _LOOK_S if self.trains and self.quiet_since_s is None else _CLOSE_LOOKS_S

    def _look(self) -> Ending | None:
        now_s = self.now_s()
        if self.launcher_error is not None:
            return Ending.NOT_LAUNCHED
        if self._over(now_s):
            return self.policy.over()
        self._discover()
        self.ranks.read_boards(now_s)
        if self.due("memory", now_s, _MEMORY_S):
            self.ranks.read_memory()
        if self.interrupted():
            self.snapshots.take()
            return Ending.INTERRUPTED
        self.audience.phase(self.ranks.progress(now_s, self.limits.deadline_s))
        if not self.trains and self.ranks.all_train:
            self.trains = True
            self.began_s = None if self.policy.observed else round(now_s, 4)
            self.write("started", t_s=round(now_s, 4))
        limits = self.limits
        if limits.deadline_s is not None and now_s >= limits.deadline_s:
            self.snapshots.take()
            return self.policy.overdue()
        self._glance(now_s, limits.deadline_s)
        return self.policy.decide(now_s, limits) if self.policy.decide else self.suspicion(now_s, limits)

    @property
    def limits(self) -> Limits:
        return since_launch(self._limits, self.began_s)

    @property
    def _limits(self) -> Limits:
        living = [board for rank, board in self.ranks.boards.items() if rank not in self.ranks.gone]
        return in_force(self.spec.limits, living or self.ranks.boards.values(), self.grown_s)

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.guarded.origin_ns) / 1e9

    def due(self, what: str, now_s: float, every_s: float) -> bool:
        if now_s < self.next_look_s.get(what, 0.0):
            return False
        self.next_look_s[what] = now_s + every_s
        return True

    def quiet_limit_s(self, limits: Limits) -> float:
        """For how long the ranks may do nothing, as far as they have come."""
        limit_s = limits.start_s if self.ranks.some_start else limits.stall_s
        assert limit_s is not None
        return limit_s

    # What the guardian says, and what the processes show.

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher = event["pid"]
        elif event["event"] == "failed":
            self.launcher_error = event["error"]
        elif event["event"] == "exit":
            if event["pid"] == self.launcher:
                self.launcher_left_s = self.now_s()
            known = next((rank for rank, pid in self.ranks.pids.items() if pid == event["pid"]), None)
            if known is not None and not self.policy.guarded:
                self.left(known, event["pid"], event.get("status"))
            self.ranks.left(event["pid"])

    def left(self, rank: int, pid: int | None, status: int | None) -> None:
        """A rank has ended. `pid`: None where it was not seen alive."""
        self.ranks.gone.add(rank)
        self.write("left", rank=rank, status=status, **({} if pid is None else {"pid": pid}))

    def _over(self, now_s: float) -> bool:
        """The launcher has left, and so have the ranks, or they had their time to follow it."""
        if self.guarded.lost:
            return True
        left_s = self.launcher_left_s
        return left_s is not None and (not self.ranks.alive or now_s - left_s > _RANKS_AFTER_LAUNCHER_S)

    def _discover(self) -> None:
        if self.launcher is not None:
            for rank, pid in self.ranks.discover(self.launcher):
                self.write("rank", rank=rank, pid=pid)

    # Suspicion, then proof.

    def suspicion(self, now_s: float, limits: Limits) -> Ending | None:
        if not self.ranks.alive:
            return None
        progress_s = self.ranks.last_progress_s()
        if self.quiet_since_s is not None and progress_s > self.quiet_since_s:
            self._release(progress_s, self.quiet_since_s)
        if self.standing is not None:
            return None
        quiet_s, limit_s = now_s - progress_s, self.quiet_limit_s(limits)
        if quiet_s < limit_s:
            return None
        if self.quiet_since_s is None:
            self._suspect(now_s, progress_s, limit_s)
        if not self.due("episode", now_s, self._interval_s(limits)):
            return None
        self.snapshots.take()
        proof = self.snapshots.proof(limits)
        if proof is not None:
            return self.policy.proven(proof)
        self.say_early(now_s, limits)
        return Ending.EARLY if self.snapshots.asked(self.policy.enough, limits) else None

    def say_early(self, now_s: float, limits: Limits) -> None:
        """What the ranks stand in: at once where that is new, else now and then with the time that is left."""
        word = self.snapshots.early_word(limits)
        if word is None:
            return
        said = (word.blocked, word.could_end)
        if said == self.said_early and not self.due("early word", now_s, _SAY_AGAIN_S):
            return
        self.said_early, self.next_look_s["early word"] = said, now_s + _SAY_AGAIN_S
        self.write("early_word", text=word.text)
        self.audience.suspect(word.text)

    def _suspect(self, now_s: float, progress_s: float, limit_s: float) -> None:
        quiet_s = now_s - progress_s
        self.quiet_since_s, self.said_early = progress_s, None
        self.snapshots.episode, self.next_look_s["episode"] = [], now_s
        self.ranks.camera.stood.clear()  # what woke before, woke to some effect
        self.write("suspect", quiet_s=round(quiet_s, 3), limit_s=limit_s)
        self.audience.suspect(f"no rank has moved for {quiet_s:.1f} s (limit {limit_s:.1f} s); taking stacks")

    def _release(self, progress_s: float, since_s: float) -> None:
        """A suspect moved again: the limit grows, so that the same pause is not suspected twice."""
        quiet_s = progress_s - since_s
        self.grown_s = max(self.grown_s, 2 * quiet_s)
        self.standing = None
        self.quiet_since_s, self.snapshots.episode = None, []
        self.write("released", quiet_s=round(quiet_s, 3))
        self.audience.released(f"moves again after {quiet_s:.1f} s; not a hang, the limit is {self.grown_s:.1f} s now")

    def _interval_s(self, limits: Limits) -> float:
        """Twice quickly for the proof of a closed wait, then often enough to see a loop's lines."""
        assert limits.busy_s is not None
        assert limits.stall_s is not None
        if len(self.snapshots.episode) < 2:
            return SETTLE_S
        return min(3.0, max(0.1, (limits.busy_s - limits.stall_s) / _LOOKS_PER_BUSY))

    def _glance(self, now_s: float, deadline_s: float | None) -> None:
        if deadline_s is None or not self.ranks.alive:
            return
        apart_s = max(_PROFILE_APART_S, deadline_s / _PROFILE_LOOKS)
        few = deadline_s < _PROFILE_LOOKS * apart_s
        late = few and now_s >= deadline_s - min(_PROFILE_S, _PROFILE_SHARE * deadline_s)
        if self.due("profile", now_s, _PROFILE_EVERY_S) and (late or self.due("far look", now_s, apart_s)):
            self.snapshots.glance(patient=not late)

    # The end.

    def close(self, ending: Ending) -> None:
        """Everything the judge will need and that only the watcher knows."""
        self.attempt.dumps.mkdir(exist_ok=True)
        for snapshot in self.snapshots.kept(ending):
            text = json_text(self.attempt.redaction.value(snapshot))
            write_document(self.attempt.dumps / f"snapshot{snapshot.number}.json", text)
        for trouble in self.ranks.camera.trouble:
            self.write("trouble", what=trouble.what, why=trouble.why, rank=trouble.rank)
        self.write("memory", **plain(self.memory.ended()))
        self.write("peaks", rss_bytes={str(rank): peak for rank, peak in self.ranks.peaks.items()})
        self.write("limits", **plain(self._limits))
        last_progress_s = self.ranks.last_progress_s()
        self.write("ending", ending=str(ending), last_progress_s=last_progress_s, error=self.launcher_error)
        with_room(self.attempt.watch, self._append)

    def write(self, event: str, **facts: Any) -> None:
        """On a disk that is full it waits for the end: until then the ranks would take whatever room is made."""
        record = {"event": event, "t_s": round(self.now_s(), 4), **facts}
        self.unwritten.append(self.attempt.redaction.value(record))
        try:
            self._append()
        except OSError as error:
            if not is_full(error):
                raise

    def _append(self) -> None:
        while self.unwritten:
            append_line(self.attempt.watch, self.unwritten[0])
            del self.unwritten[0]


def _deciding(episode: list[Snapshot]) -> list[Snapshot]:
    """The last look, the latest one before it that is far enough away to prove that nothing moved, and the first."""
    last = episode[-1]
    before = [one for one in episode if last.at_s - one.at_s >= SETTLE_S]
    return [*(before[:1] if len(before) > 1 else []), *before[-1:], last]
