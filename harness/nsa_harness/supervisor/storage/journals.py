"""Reads the journals of an attempt: the reaper's about processes, and the watcher's about progress and proofs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic does not accept typing.TypedDict before Python 3.12

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Ending, Exit, Retraction, Sample, StatusFile
from nsa_harness.core.evidence.exit_messages import AgentFailure, agent_failures, closing_signals
from nsa_harness.core.evidence.host import HostMemory, SentSignal, killed_pids
from nsa_harness.core.evidence.network import Network
from nsa_harness.core.evidence.status_file import process_and_rank
from nsa_harness.core.plan import MAX_RANKS, Limits
from nsa_harness.core.report import Trouble
from nsa_harness.core.stored_keys import stored_keys
from nsa_harness.core.verdict.limits import current_limits
from nsa_harness.core.verdict.proof import LONG_LOOP_SAMPLES
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.rundir import AttemptDir

_MAX_SIGNALS = 256  # and two for each rank
_MAX_LEFTOVERS = 256  # processes


def sent_signals(
    reaper_records: Sequence[Mapping[str, Any]],
    log: str,
    memory: HostMemory | None,
    ranks: Mapping[int, int],
    origin_ns: int,
) -> tuple[SentSignal, ...]:
    """Return the signals that were sent to the run's processes, with their senders.

    They come from the kernel's OOM killer, from launchers (`log` is their output), and from the reaper (its journal).
    `ranks` maps process ids to ranks.
    """
    # The kernel logs the host's process ids even in a container, so only ids of the run's processes count.
    killed_ranks = [pid for pid in killed_pids(memory.kill_messages if memory else ()) if pid in ranks]
    signals: list[tuple[int, str, str, float | None]] = [
        (pid, "SIGKILL", "kernel (out of memory)", None) for pid in killed_ranks
    ]
    signals += [(pid, name, sender, None) for pid, name, sender in closing_signals(log)]
    for record in reaper_records:
        at_s = (record["t_ns"] - origin_ns) / 1e9
        signals += [(pid, str(record.get("signal")), "harness", at_s) for pid in record.get("pids") or ()]
    return tuple(
        SentSignal(pid=pid, rank=ranks.get(pid), signal=name[:20], sender=sender, at_s=at_s)
        for pid, name, sender, at_s in signals[: _MAX_SIGNALS + 2 * len(ranks)]
    )


_MAX_SAMPLES = 200  # for all ranks together, but more if a proof needs more per rank
_SAMPLE_KEYS = frozenset(stored_keys(Sample).values())

_Whole = Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)]
_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


class _Record(TypedDict, total=False):
    """The types of those keys of a journal record that are checked when the record is read."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)  # type: ignore[misc]

    event: Required[str]
    t_ns: _Whole
    t_s: float
    pid: _Whole
    rank: _Rank | None
    status: _Whole | None
    origin_ns: _Whole
    ending: str
    last_progress_s: float
    error: str | None
    pids: list[_Whole]
    signal: str | None
    why: str | None
    outlived: list[str]
    left: list[str]
    rss_bytes: dict[str, _Whole]


# The keys that a record of an event must have.
_REQUIRED_KEYS = {"exit": {"t_ns", "pid"}, "rank": {"rank", "pid"}, "origin": {"origin_ns"}, "left": {"rank", "t_s"}}


_MAX_NOTES = 16  # unusable records of one journal that are reported separately


def _validate_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the record. Raise ValueError if a key is missing or a value has the wrong type."""
    typed_record: Any = type_adapter(_Record).validate_python(record)
    if missing := _REQUIRED_KEYS.get(typed_record["event"], set()) - typed_record.keys():
        raise ValueError(f"{typed_record['event']} without {', '.join(sorted(missing))}")
    return dict(typed_record)


@dataclass(kw_only=True)
class Journals:
    """The watcher's and the reaper's journal of one attempt, read once. Unusable records become `trouble`."""

    attempt: AttemptDir
    trouble: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process_records = list(self._valid_records(self.attempt.processes))
        self.watch_records = list(self._valid_records(self.attempt.watch))
        first_ns = next((event["t_ns"] for event in self.process_records if "t_ns" in event), 0)
        self.origin_ns: int = self.last_record("origin").get("origin_ns", first_ns)
        self.pids = self._rank_pids()
        self.peaks: dict[str, int] = self.last_record("peaks").get("rss_bytes") or {}

    def _valid_records(self, journal: Path) -> Iterator[dict[str, Any]]:
        invalid_count = 0
        for record in self.attempt.directory.read_records(journal):
            try:
                valid_record = _validate_record(record)
            except ValueError as error:
                invalid_count += 1
                if invalid_count <= _MAX_NOTES:
                    self._note(journal.name, first_line(error))
            else:
                yield valid_record
        if invalid_count > _MAX_NOTES:
            self._note(journal.name, f"{invalid_count - _MAX_NOTES} more records are invalid")

    def last_record(self, event: str) -> dict[str, Any]:
        """Return the watcher's last record whose event is `event`, or {} if there is none."""
        return next((record for record in reversed(self.watch_records) if record.get("event") == event), {})

    def _time_s(self, event: dict[str, Any]) -> float:
        return (int(event["t_ns"]) - self.origin_ns) / 1e9

    def ending(self) -> Ending:
        """Return the reason why the watch ended, from the reaper's journal if the watcher was killed."""
        ending = self.last_record("ending").get("ending")
        if ending in list(Ending):
            return Ending(ending)
        has_no_controller = self._events("alone") or self._events("abandoned") or not self._events("exit")
        if self.attempt.directory.exists(self.attempt.interruption_note) or has_no_controller:
            return Ending.CONTROLLER_DIED
        return Ending.EXITED

    def _events(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.process_records if record.get("event") == event and "t_ns" in record]

    def _rank_pids(self) -> dict[int, int]:
        # A process may first count as rank 0, and tell later that it is another rank.
        ranks = {
            record["pid"]: record["rank"]
            for record in self.watch_records
            if record["event"] == "rank" and record["rank"] is not None
        }
        pids = {rank: pid for pid, rank in ranks.items()}
        directory = self.attempt.directory
        for path in directory.list_files(self.attempt.probe_files, "*.board"):
            try:
                pid, rank = process_and_rank(directory.read_whole_file(path, protocol.STATUS_FILE_SIZE))
            except (OSError, ValueError) as error:
                self._note(path.name, str(error))
                continue
            if rank is not None:
                pids.setdefault(rank, pid)
        return pids

    @cached_property
    def launcher_pid(self) -> int | None:
        return next((record.get("pid") for record in self._events("started")), None)

    def exits(self) -> Iterator[Exit]:
        """Yield all exits in order of time, from the reaper's and the observer's journal and torchrun's summary."""
        teardown_times_s = [
            self._time_s(record) for record in self._events("signal") + self._events("abandoned")
        ] + self._decision_times_s()
        teardown_s = min(teardown_times_s, default=float("inf"))
        failures = {
            failure.pid: failure for failure in agent_failures(self.attempt.directory.read_tail(self.attempt.output))
        }
        ranks = {failure.pid: failure.rank for failure in failures.values()}
        ranks |= {pid: rank for rank, pid in self.pids.items()}
        exits: dict[int, Exit] = {}
        for event in sorted(self._events("exit"), key=lambda record: record["t_ns"]):
            pid, at_s = event["pid"], self._time_s(event)
            if pid in exits or (pid != self.launcher_pid and pid not in ranks):
                continue
            agent_status = failures[pid].status if pid in failures else None
            status = agent_status if event.get("status") is None else event["status"]
            exits[pid] = Exit(
                pid=pid, rank=ranks.get(pid), status=status, at_s=at_s, during_teardown=at_s >= teardown_s
            )
        all_exits = [*self._exits_in_summary(failures.values(), exits), *self._observed_exits(), *exits.values()]
        yield from sorted(all_exits, key=lambda exit: exit.at_s)

    def _observed_exits(self) -> Iterator[Exit]:
        """Yield the exits of the ranks of a job that has no reaper."""
        for record in self.watch_records:
            if record["event"] == "left":
                rank, status = record["rank"] or 0, record.get("status")
                yield Exit(
                    pid=record.get("pid", 0), rank=rank, status=status, at_s=record["t_s"], during_teardown=False
                )

    def _decision_times_s(self) -> list[float]:
        """Return the times at which an observed job's result was decided. Later exits are consequences."""
        proof_times_s = [
            record["t_s"] for record in self.watch_records if record["event"] == "proof" and "t_s" in record
        ]
        release_times_s = [
            record["t_s"] for record in self.watch_records if record["event"] == "released" and "t_s" in record
        ]
        request_s = self.last_record("asked_to_end").get("t_s")
        valid_proof_s = (
            proof_times_s[-1:] if proof_times_s and max(release_times_s, default=-1.0) < proof_times_s[-1] else []
        )
        return [*valid_proof_s, *([request_s] if request_s is not None else [])]

    def retractions(self) -> Iterator[Retraction]:
        """Yield each proof that was retracted because the job made progress again."""
        proof: dict[str, Any] | None = None
        for record in self.watch_records:
            if record["event"] == "proof":
                proof = record
            elif record["event"] == "released" and proof is not None:
                try:
                    yield type_adapter(Retraction).validate_python(
                        {
                            "at_s": proof["t_s"],
                            "kind": proof["kind"],
                            "reason": proof["reason"],
                            "quiet_s": record["quiet_s"],
                        }
                    )
                except (KeyError, ValidationError) as error:
                    self._note("retraction of a proof", first_line(error))
                proof = None

    def _exits_in_summary(self, failures: Iterable[AgentFailure], known_exits: dict[int, Exit]) -> Iterator[Exit]:
        """Yield the exits that only torchrun's summary has. Its first failure gets the earliest known time."""
        earliest_s = min((exit.at_s for exit in known_exits.values()), default=0.0)
        latest_s = max((exit.at_s for exit in known_exits.values()), default=0.0)
        for failure in failures:
            if failure.pid not in known_exits:
                at_s = earliest_s if failure.first else latest_s
                yield Exit(pid=failure.pid, rank=failure.rank, status=failure.status, at_s=at_s, during_teardown=False)

    def teardown_s(self) -> float:
        end_events = self._events("ended")
        start_events = self._events("signal") or end_events
        return self._time_s(end_events[-1]) - self._time_s(start_events[0]) if end_events else 0.0

    def leftovers(self) -> tuple[str, ...]:
        processes = (str(process)[:300] for event in self._events("ended") for process in event.get("outlived") or ())
        return tuple(dict.fromkeys(islice(processes, _MAX_LEFTOVERS)))

    def unkillable(self) -> tuple[str, ...] | None:
        """Return the processes that could not be killed, or None if this was not recorded."""
        survivor_lists = [event["left"] for event in self._events("ended") if "left" in event]
        return tuple(process[:300] for process in survivor_lists[-1][:_MAX_LEFTOVERS]) if survivor_lists else None

    def full_disk_text(self) -> str | None:
        return next((record["why"][:300] for record in self._events("full") if record.get("why")), None)

    def limits(self, spec_limits: Limits, status_files: Iterable[StatusFile | None]) -> Limits:
        """Return the limits at the end of the attempt. They are derived from the spec if they were not recorded."""
        values = {
            key: value for key, value in self.last_record("limits").items() if key.endswith("_s") and key != "t_s"
        }
        try:
            return current_limits(type_adapter(Limits).validate_python(values) if values else spec_limits, status_files)
        except ValidationError as error:
            self._note("limits", first_line(error))
            return current_limits(spec_limits, [])

    def memory(self) -> HostMemory | None:
        values = {key: value for key, value in self.last_record("memory").items() if key not in ("event", "t_s")}
        try:
            return type_adapter(HostMemory).validate_python(values) if values else None
        except ValidationError as error:
            self._note("memory", first_line(error))
            return None

    def network(self) -> Network:
        values = {key: value for key, value in self.last_record("network").items() if key not in ("event", "t_s")}
        try:
            return type_adapter(Network).validate_python(values)
        except ValidationError as error:
            self._note("network", first_line(error))
            return Network()

    def signals(self) -> tuple[SentSignal, ...]:
        ranks = {pid: rank for rank, pid in self.pids.items()}
        log = self.attempt.directory.read_tail(self.attempt.output)
        return sent_signals(self._events("signal"), log, self.memory(), ranks, self.origin_ns)

    def samples(self) -> Iterator[Sample]:
        count = max(_MAX_SAMPLES, LONG_LOOP_SAMPLES * len(self.pids))
        for record in [event for event in self.watch_records if event.get("event") == "sample"][-count:]:
            try:
                yield type_adapter(Sample).validate_python({key: record[key] for key in record.keys() & _SAMPLE_KEYS})
            except ValidationError as error:
                self._note("sample of the watcher", first_line(error))

    def _note(self, source: str, reason: str) -> None:
        self.trouble.append(Trouble(what=source, why=reason))


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [repr(error)]
    return " ".join(lines[:2])[:300]
