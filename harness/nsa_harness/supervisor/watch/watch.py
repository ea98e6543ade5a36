"""Watches one attempt until it ends, is proven to be stuck, or reaches its deadline.

Every observation is written to the journal at once. The watcher decides with the same pure functions as the judge, so
judging the stored run again gives the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from nsa_harness.core.diagnosis.stall_note import StallNote, stall_note
from nsa_harness.core.evidence.evidence import Ending, Sample, Snapshot, StatusFile
from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.evidence.reduced import bounded_snapshot
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.report import Trouble
from nsa_harness.core.verdict.limits import (
    CLOSED_WAIT_S,
    EXIT_S,
    current_limits,
    current_phases,
    has_done_first_steps,
    is_exiting,
    with_deadline_from,
    without_earlier_pauses,
)
from nsa_harness.core.verdict.proof import SETTLE_S, Proof, prove
from nsa_harness.core.verdict.wait_graph import rank_samples
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.network import NetworkWatch
from nsa_harness.supervisor.capture.node import MemoryWatch
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.capture.values import ValueReader
from nsa_harness.supervisor.launch.launcher import JobProcesses
from nsa_harness.supervisor.storage.adapters import json_object, stored_snapshot
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import is_disk_full, write_with_ballast
from nsa_harness.supervisor.storage.values import remove_values, write_values
from nsa_harness.supervisor.watch.ranks import Ranks
from nsa_harness.texts.sentences import stall_text, unreachable_text

_POLL_S = 0.4  # time between two reads of the status files, once every rank has started
_FAST_POLL_S = 0.2  # the same during start-up, when ranks may exit quickly, and while a stall is suspected
_MEMORY_S = 1.0
_NETWORK_S = 2.0
_RESOLVE_S = 5.0  # a launcher that has started no rank after this time may not know its host
_RANKS_AFTER_LAUNCHER_S = 1.0  # a rank that outlives its launcher for longer is killed
# Snapshots for the profile show which lines take a run's time. A snapshot stops a rank for 10 to 30 ms, so there are
# few of them. If the deadline is too short for many snapshots, most of them are taken shortly before it.
_MAX_PROFILE_SAMPLES, _MIN_PROFILE_INTERVAL_S = 60, 5.0
# The time before the deadline with frequent snapshots: at most 8 s, and at most a quarter of the deadline.
_LATE_PROFILE_S, _LATE_PROFILE_SHARE, _LATE_PROFILE_INTERVAL_S = 8.0, 0.25, 0.25
_SNAPSHOTS_PER_BUSY_LIMIT = 24.0
_MAX_SNAPSHOTS = 40
_QUICK_SNAPSHOTS = 3  # the first snapshots of a suspected stall must be quick, because they may prove a deadlock
_CLOSED_CHECK_S = 5.0  # time between two checks for a closed wait, from the third snapshot on
_REPORT_AGAIN_S = 30.0  # an unchanged stall note is reported again after this time


T = TypeVar("T")


class WatchListener(Protocol):
    """The interface of an object that is told at once what a watch observes."""

    def report_progress(self, progress: Progress) -> None: ...
    def report_first_snapshot(self, rows: Sequence[FirstSnapshot]) -> None: ...
    def report_stall(self, text: str) -> None: ...
    def report_recovery(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class WatchPolicy:
    """The rules for how a watch finds ranks and when it ends.

    A function that returns an Ending ends the watch. The defaults are those of a launched run. Its watch ends when its
    launcher has exited, a HANG is proven, or the deadline has passed. In a bisection, the watch also ends if the run is
    stuck like an earlier run with a proven HANG.
    """

    find_ranks: Callable[..., Ranks] = Ranks
    on_exit: Callable[[], Ending] = lambda: Ending.EXITED
    on_deadline: Callable[[], Ending | None] = lambda: Ending.DEADLINE
    on_proof: Callable[[Proof], Ending | None] = lambda _: Ending.STALL
    # Called with the arguments of `prove` if `prove` returns no proof.
    stops_early: Callable[..., bool] = lambda *_, **__: False
    decide: Callable[[float, Limits], Ending | None] | None = None  # None: `Watch.check_stall` decides
    is_observed: bool = False  # nsa-harness did not launch the job
    has_reaper: bool = True  # a reaper records exits


@dataclass(kw_only=True)
class Snapshots:
    """The snapshots taken during one attempt, and the conclusions drawn from them."""

    ranks: Ranks
    backend: str
    write: Callable[..., None]  # writes a record to the journal
    is_observed: bool = False  # nsa-harness did not launch the job, so a user may be debugging it
    episode: list[Snapshot] = field(default_factory=list)  # snapshots since a stall is suspected
    samples: list[Sample] = field(default_factory=list)
    count: int = 0
    _profile_snapshot: Snapshot | None = None

    def take(self) -> None:
        """Take a snapshot of all living ranks."""
        alive = self.ranks.living_pids
        if not alive:
            return
        self.count += 1
        snapshot = self.ranks.sampler.take(self.count, alive, prefers_heartbeat=len(self.episode) >= _QUICK_SNAPSHOTS)
        for recorder in self.ranks.sampler.pipe_requests.values() if self.count == 1 else ():
            if recorder.pipe is not None:
                self.write("asked", rank=recorder.rank, pipe=recorder.pipe)
        previous = self.episode[-1] if self.episode else None
        self.episode = [*self.episode[:1], *self.episode[1:][-_MAX_SNAPSHOTS:], snapshot]
        self._take_samples(previous, snapshot)

    def take_profile_snapshot(self, *, prefers_heartbeat: bool) -> None:
        """Take a snapshot that is used for a profile, but neither stored nor used as proof of a hang.

        `prefers_heartbeat`: request the flight recorder from the heartbeat thread first, which takes longer. The
        samples of this snapshot compare it with the latest snapshot of any kind. If it were compared with an older one,
        progress from before the suspected stall would seem to have happened after it.
        """
        snapshot = self.ranks.sampler.take(
            0, self.ranks.living_pids, writes_dumps=False, prefers_heartbeat=prefers_heartbeat
        )
        earlier_snapshots = [earlier for earlier in (self._profile_snapshot, *self.episode[-1:]) if earlier is not None]
        self._take_samples(max(earlier_snapshots, key=lambda earlier: earlier.at_s, default=None), snapshot)
        self._profile_snapshot = snapshot

    def begin_episode(self) -> None:
        """Forget the snapshots of an earlier pause, and the wake-ups of threads before the last progress."""
        self.episode = []
        self.ranks.sampler.last_tasks.clear()

    def show_closed_wait(self, limits: Limits) -> bool:
        """Take a snapshot that is not stored, and return whether the episode shows that no wait can end."""
        sampler = self.ranks.sampler
        trouble_count = len(sampler.trouble)
        snapshot = sampler.take(0, self.ranks.living_pids, writes_dumps=False, prefers_heartbeat=True)
        del sampler.trouble[trouble_count:]  # this snapshot is no evidence, so its gaps are none of the run
        self.episode = [*self.episode[-2:], snapshot]
        proof = self.evaluate(prove, limits)
        return proof is not None and proof.is_closed

    def proof(self, limits: Limits, *, only_closed: bool = False) -> Proof | None:
        """Return, and record, the proof that the run is stuck. `only_closed`: only a proof that no wait can end."""
        proof = self.evaluate(partial(prove, attended=self.is_observed), limits)
        if proof is None or (only_closed and not proof.is_closed):
            return None
        self.write("proof", kind=str(proof.kind), reason=proof.reason)
        return proof

    def stall_note(self, limits: Limits) -> StallNote | None:
        """Return a note that says where the ranks are blocked, or None if that is unknown."""
        return self.evaluate(partial(stall_note, attended=self.is_observed), limits)

    def evaluate(self, rule: Callable[..., T], limits: Limits) -> T:
        """Call `rule`, a function such as `prove`, with the snapshots taken since the ranks stopped making progress."""
        return rule(
            self.episode,
            self.samples,
            last_progress_s=self.ranks.last_progress_s(),
            limits=limits,
            exited_ranks=self.ranks.exited_ranks,
            backend=self.backend,
        )

    def snapshots_to_store(self, ending: Ending) -> list[Snapshot]:
        """Return the snapshots to store: those that prove a HANG, otherwise the first and the last two."""
        return (
            _deciding_snapshots(self.episode) if ending is Ending.STALL else [*self.episode[:1], *self.episode[1:][-2:]]
        )

    def _take_samples(self, previous: Snapshot | None, snapshot: Snapshot) -> None:
        for sample in rank_samples(previous, snapshot, self.ranks.exited_ranks, self.backend):
            self.samples.append(sample)
            self.write("sample", **json_object(sample))


@dataclass(kw_only=True)
class Watch:
    """The observation of one attempt to run a program, from its launch to its end."""

    job: JobProcesses
    spec: RunSpec
    attempt: AttemptDir
    listener: WatchListener
    is_interrupted: Callable[[], bool]
    policy: WatchPolicy = field(default_factory=WatchPolicy)
    launcher_pid: int | None = None
    launcher_exit_s: float | None = None
    launcher_error: str | None = None  # the reason why the launcher could not be started
    has_started: bool = False  # every rank has finished its start-up
    started_s: float | None = None  # when every rank of a launched run had finished its start-up
    stalled_since_s: float | None = None  # the last progress before a suspected stall; None = no stall is suspected
    stalled_phases: frozenset[str] = frozenset()  # phases of the suspected stall; empty during start-up
    checked_since_s: float | None = None  # the last progress before the pause that is checked for a closed wait
    learned_limits_s: dict[str, float] = field(default_factory=dict)  # phase -> lower bound for its stall limit
    startup_pauses_s: dict[int, dict[str, float]] | None = None  # rank -> its longest pause in each phase of start-up
    reported_stall: object = None  # the state of the suspected stall that was reported last
    reported_proof: Proof | None = None  # a reported proof for an observed job, until the job makes progress again
    has_read_after_failure: bool = False  # the values of all ranks were read after the first failure of a rank
    launchers: list[int] = field(default_factory=list)  # the processes that were there before the first rank
    next_due_s: dict[str, float] = field(default_factory=dict)
    unwritten: list[dict[str, Any]] = field(default_factory=list)  # records for the journal while the disk is full

    def __post_init__(self) -> None:
        dumps = self.attempt.dumps.resolve()
        sampler = StackSampler(
            origin_ns=self.job.origin_ns, probe_dir=self.job.probe_dir, dumps=dumps, redaction=self.attempt.redaction
        )
        self.ranks = self.policy.find_ranks(spec=self.spec, job=self.job, sampler=sampler)
        self.snapshots = Snapshots(
            ranks=self.ranks, backend=self.spec.backend, write=self.write, is_observed=self.policy.is_observed
        )
        self.memory, self.network = MemoryWatch(), NetworkWatch()
        self.write("origin", origin_ns=self.job.origin_ns)
        if self.policy.is_observed:
            self.write("observed")

    def run(self) -> Ending:
        """Watch until the run ends or its result is decided, and return why. The caller must end its processes."""
        while True:
            for event in self.job.events(self._wait_s):
                self._receive(event)
            ending = self._poll()
            if ending is None:
                continue
            if not (self.reported_proof and ending is Ending.STALL):  # a reported proof was written when it was found
                self.close(ending)
            return ending

    @property
    def _wait_s(self) -> float:
        return _POLL_S if self.has_started and self.stalled_since_s is None else _FAST_POLL_S

    def _poll(self) -> Ending | None:
        now_s = self.now_s()
        if self.launcher_error is not None:
            return Ending.NOT_LAUNCHED
        if self._is_over(now_s):
            return self.policy.on_exit()
        self._discover()
        self.ranks.read_status_files(now_s)
        if self.is_due("memory", now_s, _MEMORY_S):
            self.ranks.read_memory()
        if self.ranks.has_other_hosts and self.is_due("network", now_s, _NETWORK_S):
            self._read_network(now_s)
        if self.is_interrupted():
            self.snapshots.take()
            return Ending.INTERRUPTED
        self.listener.report_progress(self.ranks.progress(now_s, self.limits.deadline_s))
        if not self.has_started and self.ranks.all_started:
            self.has_started = True
            self.started_s = None if self.policy.is_observed else round(now_s, 4)
            self.write("started", t_s=round(now_s, 4))
        self._forget_startup()
        limits = self.limits
        if limits.deadline_s is not None and now_s >= limits.deadline_s:
            self.snapshots.take()
            return self.policy.on_deadline()
        self._take_profile_snapshot(now_s, limits.deadline_s)
        return self.policy.decide(now_s, limits) if self.policy.decide else self.check_stall(now_s, limits)

    @property
    def limits(self) -> Limits:
        return with_deadline_from(self._limits, self.started_s)

    @property
    def _limits(self) -> Limits:
        startup_s = self.startup_pauses_s or {}
        files = self._living_status_files or self.ranks.status_files
        later = [file and without_earlier_pauses(file, startup_s.get(rank, {})) for rank, file in files.items()]
        return current_limits(self.spec.limits, later, self.learned_limits_s)

    @property
    def _living_status_files(self) -> dict[int, StatusFile | None]:
        return {rank: file for rank, file in self.ranks.status_files.items() if rank not in self.ranks.exited_ranks}

    def _forget_startup(self) -> None:
        """Once all ranks have done their first steps, forget the pauses and limits of start-up, which are longer."""
        files = {rank: file for rank, file in self._living_status_files.items() if file is not None}
        if self.startup_pauses_s is None and files and all(map(has_done_first_steps, files.values())):
            self.startup_pauses_s = {rank: file.gaps_s for rank, file in files.items()}
            self.learned_limits_s.clear()
            self.stalled_phases = frozenset()  # a stall that ends now was a pause of start-up too

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.job.origin_ns) / 1e9

    def is_due(self, task: str, now_s: float, every_s: float) -> bool:
        """Return whether a periodic task is due. If it is, schedule it again after `every_s` seconds."""
        if now_s < self.next_due_s.get(task, 0.0):
            return False
        self.next_due_s[task] = now_s + every_s
        return True

    def stall_limit_s(self, limits: Limits) -> float:
        """Return the seconds without progress after which a stall is suspected: longer at the start and at the end."""
        limit_s = limits.start_s if self.ranks.is_starting else limits.stall_s
        assert limit_s is not None
        files = self._living_status_files.values()
        exits = bool(files) and self.spec.limits.stall_s is None and all(map(is_exiting, files))
        return max(EXIT_S, limit_s) if exits else limit_s

    def closed_wait_limit_s(self, limit_s: float) -> float:
        """Return how long the ranks may make no progress before they are checked for a closed wait.

        Nothing can end such a wait, so it needs no longer limit in slow phases. A limit that the user has set is kept.
        """
        fixed = self.spec.limits
        set_s = (fixed.start_s or fixed.stall_s) if self.ranks.is_starting else fixed.stall_s
        is_blind = None in self._living_status_files.values()
        return min(limit_s, max(CLOSED_WAIT_S, set_s or 0.0)) if not is_blind else limit_s

    # Events of the reaper, and the processes.

    def _receive(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.launcher_pid = event["pid"]
        elif event["event"] == "failed":
            self.launcher_error = event["error"]
        elif event["event"] == "exit":
            if event["pid"] == self.launcher_pid:
                self.launcher_exit_s = self.now_s()
            rank = next((rank for rank, pid in self.ranks.pids.items() if pid == event["pid"]), None)
            if rank is not None and not self.policy.has_reaper:
                self.record_exit(rank, event["pid"], event.get("status"))
            self.ranks.mark_exited(event["pid"])
            if rank is not None and event.get("status") and self.stalled_since_s is None:
                self.read_values_after_failure()

    def record_exit(self, rank: int, pid: int | None, status: int | None) -> None:
        """Record that a rank has exited. `pid` is None if the rank was never seen alive."""
        self.ranks.exited_ranks.add(rank)
        self.write("left", rank=rank, status=status, **({} if pid is None else {"pid": pid}))

    def _is_over(self, now_s: float) -> bool:
        """Return whether the run is over, because its processes have exited or no reaper is left."""
        if self.job.is_lost:
            return True
        exit_s = self.launcher_exit_s
        return exit_s is not None and (not self.ranks.living_pids or now_s - exit_s > _RANKS_AFTER_LAUNCHER_S)

    def _discover(self) -> None:
        if self.launcher_pid is not None:
            for rank, pid in self.ranks.discover(self.launcher_pid):
                self.write("rank", rank=rank, pid=pid)

    def _read_network(self, now_s: float) -> None:
        """Read the connections to other hosts, and report at once what nothing answers."""
        if not self.ranks.pids and self.launcher_pid is not None:
            self.launchers = [self.launcher_pid, *(stat.pid for stat in procfs.descendants(self.launcher_pid))]
            if now_s > _RESOLVE_S:
                self.network.resolve(self.launchers)
        processes = {**dict.fromkeys(self.launchers), **{pid: rank for rank, pid in self.ranks.living_pids.items()}}
        for found in self.network.read(processes, now_s):
            text = unreachable_text(found)
            self.write("early_word", text=text)
            self.listener.report_stall(text)

    # A suspected stall, then its proof.

    def check_stall(self, now_s: float, limits: Limits) -> Ending | None:
        """Suspect a stall after too long without progress, and try to prove a hang. An Ending ends the watch."""
        if not self.ranks.living_pids:
            return None
        progress_s = self.ranks.last_progress_s()
        if self.stalled_since_s is not None and progress_s > self.stalled_since_s:
            self.end_suspicion(progress_s)
        pause_s, limit_s = now_s - progress_s, self.stall_limit_s(limits)
        if self.stalled_since_s is None:
            if pause_s < limit_s and not self._has_closed_wait(now_s, progress_s, limits):
                return None
            self.begin_suspicion(now_s, progress_s, limit_s)
        if not self.is_due("episode", now_s, self.interval_s(limits)):
            return None
        self.snapshots.take()
        proof = self.snapshots.proof(limits, only_closed=pause_s < limit_s)
        if proof is not None:
            self.read_values()
            return self.policy.on_proof(proof)
        self.report_stall(now_s, limits)
        return Ending.EARLY if self.snapshots.evaluate(self.policy.stops_early, limits) else None

    def read_values(self, *, takes_written: bool = False) -> None:
        """Read and store the values of names on the stacks. `takes_written`: also those that ranks have written."""
        if not self.attempt.reads_values:
            return
        living = self.ranks.living_pids
        ended = {rank: pid for rank, pid in self.ranks.pids.items() if rank not in living}
        reader = ValueReader(probe_dir=self.job.probe_dir)
        try:
            write_values(self.attempt, reader.read(living, ended, takes_written=takes_written))
        except OSError as error:
            reader.trouble.append(Trouble(what="values", why=str(error)))
        known = self.ranks.sampler.trouble
        known.extend(each for each in reader.trouble if each not in known)

    def read_values_after_failure(self) -> None:
        """Read the values of all ranks once, because a rank has failed while others live."""
        if not self.has_read_after_failure and self.ranks.living_pids:
            self.has_read_after_failure = True
            self.read_values(takes_written=True)

    def report_stall(self, now_s: float, limits: Limits) -> None:
        """Report where the ranks are blocked. Repeat the report if they block elsewhere, or after 30 s."""
        note = self.snapshots.stall_note(limits)
        if note is None:
            return
        state = (note.stalled_ranks, note.moving_ranks, note.open_waits)
        if state == self.reported_stall and not self.is_due("early word", now_s, _REPORT_AGAIN_S):
            return
        self.reported_stall, self.next_due_s["early word"] = state, now_s + _REPORT_AGAIN_S
        text = stall_text(note)
        self.write("early_word", text=text)
        self.listener.report_stall(text)

    def _has_closed_wait(self, now_s: float, progress_s: float, limits: Limits) -> bool:
        """Return whether nothing can end the waits of a pause that is still shorter than the stall limit."""
        if now_s - progress_s < self.closed_wait_limit_s(self.stall_limit_s(limits)):
            return False
        if self.checked_since_s != progress_s:
            self.checked_since_s, self.next_due_s["closed wait"] = progress_s, now_s
            self.snapshots.begin_episode()
        interval_s = SETTLE_S + _FAST_POLL_S if len(self.snapshots.episode) < 2 else _CLOSED_CHECK_S
        return self.is_due("closed wait", now_s, interval_s) and self.snapshots.show_closed_wait(limits)

    def begin_suspicion(self, now_s: float, progress_s: float, limit_s: float) -> None:
        pause_s = now_s - progress_s
        self.stalled_since_s, self.reported_stall = progress_s, None
        self.stalled_phases = (
            frozenset() if self.ranks.is_starting else current_phases(self._living_status_files.values())
        )
        self.next_due_s["episode"] = now_s
        self.snapshots.begin_episode()
        self.write("suspect", quiet_s=round(pause_s, 3), limit_s=limit_s)
        reason = f" (limit {limit_s:.1f} s)" if pause_s >= limit_s else ", and nothing seems able to end that"
        self.listener.report_stall(f"no rank has made progress for {pause_s:.1f} s{reason}; taking stacks")

    def end_suspicion(self, progress_s: float) -> None:
        """Stop suspecting a stall, because a rank made progress at `progress_s`. A reported proof is retracted.

        The limit of the phase is raised, so another pause of the same length will not be suspected. A pause during
        start-up raises no limit.
        """
        assert self.stalled_since_s is not None
        pause_s = progress_s - self.stalled_since_s
        self.reported_proof = None
        remove_values(self.attempt, self.spec.ranks)
        self.stalled_since_s, self.snapshots.episode = None, []
        self.write("released", quiet_s=round(pause_s, 3))
        text = f"progress again after {pause_s:.1f} s, so it was no hang"
        for phase in self.stalled_phases:
            self.learned_limits_s[phase] = max(self.learned_limits_s.get(phase, 0.0), 2 * pause_s)
        if self.stalled_phases:
            limit_s = max(self.learned_limits_s[phase] for phase in self.stalled_phases)
            text += f"; the limit for pauses of this kind is now {limit_s:.1f} s"
        self.listener.report_recovery(text)

    def interval_s(self, limits: Limits) -> float:
        """Return the seconds until the next snapshot: short before the second one, then long enough to see a loop."""
        assert limits.busy_s is not None
        assert limits.stall_s is not None
        if len(self.snapshots.episode) < 2:
            return SETTLE_S
        return min(3.0, max(0.1, (limits.busy_s - limits.stall_s) / _SNAPSHOTS_PER_BUSY_LIMIT))

    def _take_profile_snapshot(self, now_s: float, deadline_s: float | None) -> None:
        if deadline_s is None or not self.ranks.living_pids:
            return
        interval_s = max(_MIN_PROFILE_INTERVAL_S, deadline_s / _MAX_PROFILE_SAMPLES)
        deadline_is_short = deadline_s < _MAX_PROFILE_SAMPLES * interval_s
        is_late = deadline_is_short and now_s >= deadline_s - min(_LATE_PROFILE_S, _LATE_PROFILE_SHARE * deadline_s)
        if self.is_due("profile", now_s, _LATE_PROFILE_INTERVAL_S) and (
            is_late or self.is_due("far look", now_s, interval_s)
        ):
            self.snapshots.take_profile_snapshot(prefers_heartbeat=not is_late)

    # Journal.

    def close(self, ending: Ending) -> None:
        """Write the snapshots and everything else that the judge needs to the journal."""
        if not self.attempt.directory.is_in_place(self.attempt.path):
            return
        self.attempt.directory.make_directory(self.attempt.dumps)
        for snapshot in self.snapshots.snapshots_to_store(ending):
            text = stored_snapshot(self.attempt.redaction.value(bounded_snapshot(snapshot)))
            self.attempt.directory.write(self.attempt.dumps / f"snapshot{snapshot.number}.json", text)
        # A rank with a status file stores its flight recorder when it exits. If the run has exited, a request that was
        # refused earlier, such as during start-up on a busy machine, is no gap.
        storing_ranks = {rank for rank, file in self.ranks.status_files.items() if file and ending is Ending.EXITED}
        for trouble in self.ranks.sampler.trouble:
            if trouble.what == "flight recorder" and trouble.rank in storing_ranks:
                continue
            self.write("trouble", what=trouble.what, why=trouble.why, rank=trouble.rank)
        self.write("memory", **json_object(self.memory.changes()))
        self.write("network", **json_object(self.network.result()))
        self.write("peaks", rss_bytes={str(rank): peak for rank, peak in self.ranks.peaks.items()})
        self.write("limits", **json_object(self._limits))
        last_progress_s = self.ranks.last_progress_s()
        self.write("ending", ending=str(ending), last_progress_s=last_progress_s, error=self.launcher_error)
        write_with_ballast(self.attempt.watch, self._append)

    def write(self, event: str, **facts: Any) -> None:
        """Write a record to the journal. If the disk is full, keep the record until the end of the watch.

        Disk space that is freed earlier would be used up by the ranks. If the directory of the attempt was removed or
        replaced, the record is kept in memory only, and the program continues.
        """
        record = {"event": event, "t_s": round(self.now_s(), 4), **facts}
        self.unwritten.append(self.attempt.redaction.value(record))
        try:
            self._append()
        except OSError as error:
            if not is_disk_full(error) and self.attempt.directory.is_in_place(self.attempt.path):
                raise

    def _append(self) -> None:
        while self.unwritten:
            self.attempt.append_record(self.attempt.watch, self.unwritten[0])
            del self.unwritten[0]


def _deciding_snapshots(episode: list[Snapshot]) -> list[Snapshot]:
    """Return the snapshots in `episode`, at most three, that prove a hang."""
    last = episode[-1]
    earlier_snapshots = [snapshot for snapshot in episode if last.at_s - snapshot.at_s >= SETTLE_S]
    return [*(earlier_snapshots[:1] if len(earlier_snapshots) > 1 else []), *earlier_snapshots[-1:], last]
