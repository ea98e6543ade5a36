"""The two journals of an attempt: the reaper's, about the processes, and the watcher's, about progress and proof."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other one before Python 3.12

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Ending, Exit, Retraction, Sample, StatusFile
from nsa_harness.core.evidence.exit_messages import AgentFailure, agent_failures, closing_signals
from nsa_harness.core.evidence.host import HostMemory, SentSignal, killed_pids
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.plan import MAX_RANKS, Limits
from nsa_harness.core.report import Trouble
from nsa_harness.core.stored_keys import stored_keys
from nsa_harness.core.verdict.limits import current_limits
from nsa_harness.core.verdict.proof import LONG_LOOP_SAMPLES
from nsa_harness.supervisor.storage.adapters import adapter
from nsa_harness.supervisor.storage.rundir import AttemptDir

_MAX_SIGNALS = 256
_MAX_LEFT = 256  # processes


def sent_signals(
    guarded: Sequence[Mapping[str, Any]], log: str, memory: HostMemory | None, ranks: Mapping[int, int], origin_ns: int
) -> tuple[SentSignal, ...]:
    """Return the signals of the OOM killer, of launchers (from their log) and of the reaper (from its journal).

    `ranks` are by process id.
    """
    # The kernel logs process ids of the host even in a container, so only ids of the run's processes count.
    killed = [pid for pid in killed_pids(memory.kill_messages if memory else ()) if pid in ranks]
    sent: list[tuple[int, str, str, float | None]] = [
        (pid, "SIGKILL", "kernel (out of memory)", None) for pid in killed
    ]
    sent += [(pid, name, sender, None) for pid, name, sender in closing_signals(log)]
    for record in guarded:
        at_s = (record["t_ns"] - origin_ns) / 1e9
        sent += [(pid, str(record.get("signal")), "harness", at_s) for pid in record.get("pids") or ()]
    return tuple(
        SentSignal(pid=pid, rank=ranks.get(pid), signal=name[:20], sender=sender, at_s=at_s)
        for pid, name, sender, at_s in sent[:_MAX_SIGNALS]
    )


_KEPT_SAMPLES = 200  # for all ranks together; more if a proof needs more per rank
_SAMPLE_KEYS = frozenset(stored_keys(Sample).values())

_Whole = Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)]
_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


class _Record(TypedDict, total=False):
    """The keys of records and their types; other keys are not checked."""

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


# The keys without which a record of that kind is useless.
_NEEDED = {"exit": {"t_ns", "pid"}, "rank": {"rank", "pid"}, "origin": {"origin_ns"}, "left": {"rank", "t_s"}}


_MAX_NOTED = 16  # unusable records of one journal


def _validated(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the types of `_Record`. Raises ValueError."""
    checked: Any = adapter(_Record).validate_python(record)
    if missing := _NEEDED.get(checked["event"], set()) - checked.keys():
        raise ValueError(f"{checked['event']} without {', '.join(sorted(missing))}")
    return dict(checked)


@dataclass(kw_only=True)
class Journals:
    """Both journals, read once; a record that cannot be used becomes `trouble`."""

    attempt: AttemptDir
    trouble: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = list(self._valid_records(self.attempt.processes))
        self.watched = list(self._valid_records(self.attempt.watch))
        first_ns = next((event["t_ns"] for event in self.processes if "t_ns" in event), 0)
        self.origin_ns: int = self.last_record("origin").get("origin_ns", first_ns)
        self.pids = self._rank_pids()

    def _valid_records(self, journal: Path) -> Iterator[dict[str, Any]]:
        """Yield the records that have the right types and keys."""
        wrong = 0
        for record in self.attempt.door.records(journal):
            try:
                checked = _validated(record)
            except ValueError as error:
                wrong += 1
                if wrong <= _MAX_NOTED:
                    self._note(journal.name, first_line(error))
            else:
                yield checked
        if wrong > _MAX_NOTED:
            self._note(journal.name, f"{wrong - _MAX_NOTED} more records make no sense")

    def last_record(self, event: str) -> dict[str, Any]:
        """Return the last record of that event, or {}."""
        return next((record for record in reversed(self.watched) if record.get("event") == event), {})

    def _seconds(self, event: dict[str, Any]) -> float:
        return (int(event["t_ns"]) - self.origin_ns) / 1e9

    def ending(self) -> Ending:
        ending = self.last_record("ending").get("ending")
        if ending in list(Ending):
            return Ending(ending)
        left_alone = self._events("alone") or self._events("abandoned") or not self._events("exit")
        if self.attempt.door.exists(self.attempt.abandoned) or left_alone:
            return Ending.CONTROLLER_DIED
        return Ending.EXITED

    def _events(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.processes if record.get("event") == event and "t_ns" in record]

    def _rank_pids(self) -> dict[int, int]:
        """Return the process id of each rank, from the watcher or else from the status files."""
        pids = {
            record["rank"]: record["pid"]
            for record in self.watched
            if record["event"] == "rank" and record["rank"] is not None
        }
        door = self.attempt.door
        for path in door.files(self.attempt.boards, "*.board"):
            try:
                board = parse_board(door.whole(path, protocol.STATUS_FILE_SIZE), self.origin_ns)
            except (OSError, ValueError) as error:
                self._note(path.name, str(error))
                continue
            if board.rank is not None:
                pids.setdefault(board.rank, board.pid)
        return pids

    @property
    def launcher(self) -> int | None:
        return next((record.get("pid") for record in self._events("started")), None)

    def exits(self) -> Iterator[Exit]:
        """Yield all exits in order of time: those that the reaper saw, and those that only torchrun's summary shows."""
        killing = [
            self._seconds(record) for record in self._events("signal") + self._events("abandoned")
        ] + self._decided_s()
        begun_s = min(killing, default=float("inf"))
        agent = {failure.pid: failure for failure in agent_failures(self.attempt.door.tail(self.attempt.output))}
        ranks = {failure.pid: failure.rank for failure in agent.values()}
        ranks |= {pid: rank for rank, pid in self.pids.items()}
        seen: dict[int, Exit] = {}
        for event in sorted(self._events("exit"), key=lambda record: record["t_ns"]):
            pid, at_s = event["pid"], self._seconds(event)
            if pid in seen or (pid != self.launcher and pid not in ranks):
                continue
            reported = agent[pid].status if pid in agent else None
            status = reported if event.get("status") is None else event["status"]
            seen[pid] = Exit(pid=pid, rank=ranks.get(pid), status=status, at_s=at_s, during_teardown=at_s >= begun_s)
        ended = [*self._exits_of_summary(agent.values(), seen), *self._exits_without_reaper(), *seen.values()]
        yield from sorted(ended, key=lambda exit: exit.at_s)

    def _exits_without_reaper(self) -> Iterator[Exit]:
        """Yield the exits of a job without a reaper, as its observer recorded them."""
        for record in self.watched:
            if record["event"] == "left":
                rank, status = record["rank"] or 0, record.get("status")
                yield Exit(
                    pid=record.get("pid", 0), rank=rank, status=status, at_s=record["t_s"], during_teardown=False
                )

    def _decided_s(self) -> list[float]:
        """Return when a proof that was not retracted, or a signal, decided an observed job.

        Later exits are consequences, not causes.
        """
        proofs = [record["t_s"] for record in self.watched if record["event"] == "proof" and "t_s" in record]
        released = [record["t_s"] for record in self.watched if record["event"] == "released" and "t_s" in record]
        requested = self.last_record("asked_to_end").get("t_s")
        settled = proofs[-1:] if proofs and max(released, default=-1.0) < proofs[-1] else []
        return [*settled, *([requested] if requested is not None else [])]

    def retracted(self) -> Iterator[Retraction]:
        """Yield each proof that was retracted later."""
        proof: dict[str, Any] | None = None
        for record in self.watched:
            if record["event"] == "proof":
                proof = record
            elif record["event"] == "released" and proof is not None:
                try:
                    yield adapter(Retraction).validate_python(
                        {
                            "at_s": proof["t_s"],
                            "kind": proof["kind"],
                            "reason": proof["reason"],
                            "quiet_s": record["quiet_s"],
                        }
                    )
                except (KeyError, ValidationError) as error:
                    self._note("a retraction", first_line(error))
                proof = None

    def _exits_of_summary(self, agent: Iterable[AgentFailure], seen: dict[int, Exit]) -> Iterator[Exit]:
        """Yield the exits that the reaper missed between two polls; torchrun's agent names the first failure."""
        earliest_s = min((exit.at_s for exit in seen.values()), default=0.0)
        latest_s = max((exit.at_s for exit in seen.values()), default=0.0)
        for failure in agent:
            if failure.pid not in seen:
                at_s = earliest_s if failure.first else latest_s
                yield Exit(pid=failure.pid, rank=failure.rank, status=failure.status, at_s=at_s, during_teardown=False)

    def teardown_s(self) -> float:
        ended = self._events("ended")
        began = self._events("signal") or ended
        return self._seconds(ended[-1]) - self._seconds(began[0]) if ended else 0.0

    def outlived(self) -> tuple[str, ...]:
        processes = (str(process)[:300] for event in self._events("ended") for process in event.get("outlived") or ())
        return tuple(dict.fromkeys(islice(processes, _MAX_LEFT)))

    def undead(self) -> tuple[str, ...] | None:
        """Return the processes that could not be killed, or None if no reaper lived to record them."""
        seen = [event["left"] for event in self._events("ended") if "left" in event]
        return tuple(process[:300] for process in seen[-1][:_MAX_LEFT]) if seen else None

    def disk_full(self) -> str | None:
        return next((record["why"][:300] for record in self._events("full") if record.get("why")), None)

    def limits(self, declared: Limits, boards: Iterable[StatusFile | None]) -> Limits:
        """Return the limits at the end, or the spec's limits if the watcher was killed before it recorded them."""
        values = {
            key: value for key, value in self.last_record("limits").items() if key.endswith("_s") and key != "t_s"
        }
        try:
            return current_limits(adapter(Limits).validate_python(values) if values else declared, boards)
        except ValidationError as error:
            self._note("limits", first_line(error))
            return current_limits(declared, [])

    def memory(self) -> HostMemory | None:
        values = {key: value for key, value in self.last_record("memory").items() if key not in ("event", "t_s")}
        try:
            return adapter(HostMemory).validate_python(values) if values else None
        except ValidationError as error:
            self._note("memory", first_line(error))
            return None

    def signals(self) -> tuple[SentSignal, ...]:
        ranks = {pid: rank for rank, pid in self.pids.items()}
        log = self.attempt.door.tail(self.attempt.output)
        return sent_signals(self._events("signal"), log, self.memory(), ranks, self.origin_ns)

    def samples(self) -> Iterator[Sample]:
        count = max(_KEPT_SAMPLES, LONG_LOOP_SAMPLES * len(self.pids))
        for record in [event for event in self.watched if event.get("event") == "sample"][-count:]:
            try:
                yield adapter(Sample).validate_python({key: record[key] for key in record.keys() & _SAMPLE_KEYS})
            except ValidationError as error:
                self._note("a sample of the watcher", first_line(error))

    def _note(self, what: str, why: str) -> None:
        self.trouble.append(Trouble(what=what, why=why))


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [repr(error)]
    return " ".join(lines[:2])[:300]
