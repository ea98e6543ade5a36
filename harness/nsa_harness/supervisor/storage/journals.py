"""The two journals of an attempt: what the guardian did to the processes, and what the watcher saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from nsa_harness.core.verdict.limits import in_force
from nsa_harness.core.verdict.proof import TURN_SAMPLES
from nsa_harness.supervisor.storage.adapters import adapter
from nsa_harness.supervisor.storage.rundir import AttemptDir

_MAX_SIGNALS = 256
_MAX_LEFT = 256  # processes


def sent_signals(
    guarded: Sequence[Mapping[str, Any]], log: str, memory: HostMemory | None, ranks: Mapping[int, int], origin_ns: int
) -> tuple[SentSignal, ...]:
    """Signals of the kernel's OOM killer, of launchers (their log), of the guardian (its journal). By pid: `ranks`."""
    # The kernel's log counts processes as the host does, in a container too: only those of the run count.
    killed = [pid for pid in killed_pids(memory.killed if memory else ()) if pid in ranks]
    found: list[tuple[int, str, str, float | None]] = [
        (pid, "SIGKILL", "kernel (out of memory)", None) for pid in killed
    ]
    found += [(pid, name, sender, None) for pid, name, sender in closing_signals(log)]
    for record in guarded:
        at_s = (int(record["t_ns"]) - origin_ns) / 1e9
        found += [(pid, str(record.get("signal")), "harness", at_s) for pid in record.get("pids") or ()]
    return tuple(
        SentSignal(pid=pid, rank=ranks.get(pid), signal=name[:20], sender=sender, at_s=at_s)
        for pid, name, sender, at_s in found[:_MAX_SIGNALS]
    )


_KEPT_SAMPLES = 200  # of all ranks together, but of each one as many as any proof asks for
_SAMPLE_KEYS = frozenset(one.name for one in fields(Sample))

_Whole = Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)]
_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


class _Record(TypedDict, total=False):
    """What any record may hold, and of which type; what else it holds is not looked at."""

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


# What a record of that kind says nothing without.
_NEEDED = {"exit": {"t_ns", "pid"}, "rank": {"rank", "pid"}, "origin": {"origin_ns"}, "left": {"rank", "t_s"}}


_MAX_TOLD = 16  # of the records of one journal


def _mistake(record: dict[str, Any]) -> str:
    try:
        adapter(_Record).validate_python(record)
    except ValidationError as error:
        return first_line(error)
    missing = _NEEDED.get(record["event"], set()) - record.keys()
    return f"{record['event']} without {', '.join(sorted(missing))}" if missing else ""


@dataclass(kw_only=True)
class Journals:
    """Read once; a record that does not make sense becomes `trouble`."""

    attempt: AttemptDir
    trouble: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = list(self._sound(self.attempt.processes))
        self.watched = list(self._sound(self.attempt.watch))
        first_ns = next((int(event["t_ns"]) for event in self.processes if "t_ns" in event), 0)
        self.origin_ns: int = self.said("origin").get("origin_ns", first_ns)
        self.pids = self._rank_pids()

    def _sound(self, journal: Path) -> Iterator[dict[str, Any]]:
        """The records of the right form."""
        wrong = 0
        for record in self.attempt.door.records(journal):
            why = _mistake(record)
            if not why:
                yield record
                continue
            wrong += 1
            if wrong <= _MAX_TOLD:
                self._note(journal.name, why)
        if wrong > _MAX_TOLD:
            self._note(journal.name, f"{wrong - _MAX_TOLD} more records make no sense")

    def said(self, event: str) -> dict[str, Any]:
        """The last record of that kind; empty when there is none."""
        return next((one for one in reversed(self.watched) if one.get("event") == event), {})

    def _seconds(self, event: dict[str, Any]) -> float:
        return (int(event["t_ns"]) - self.origin_ns) / 1e9

    def ending(self) -> Ending:
        said = self.said("ending").get("ending")
        if said in list(Ending):
            return Ending(said)
        left_alone = self._of("alone") or self._of("abandoned") or not self._of("exit")
        if self.attempt.door.there(self.attempt.abandoned) or left_alone:
            return Ending.ABANDONED
        return Ending.EXITED

    def _of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.processes if one.get("event") == event and "t_ns" in one]

    def _rank_pids(self) -> dict[int, int]:
        """The process of each rank: as the watcher found it, or as the boards say."""
        pids = {int(one["rank"]): int(one["pid"]) for one in self.watched if one.get("event") == "rank"}
        door = self.attempt.door
        for path in door.files(self.attempt.boards, "*.board"):
            try:
                board = parse_board(door.whole(path, protocol.BOARD_SIZE), self.origin_ns)
            except (OSError, ValueError) as error:
                self._note(path.name, str(error))
                continue
            if board.rank is not None:
                pids.setdefault(board.rank, board.pid)
        return pids

    @property
    def launcher(self) -> int | None:
        return next((one.get("pid") for one in self._of("started")), None)

    def exits(self) -> Iterator[Exit]:
        """Ends in order of time, by our own watching; the launcher's summary fills in what we missed."""
        killing = [self._seconds(one) for one in self._of("signal") + self._of("abandoned")] + self._settled_s()
        begun_s = min(killing, default=float("inf"))
        agent = {failure.pid: failure for failure in agent_failures(self.attempt.door.tail(self.attempt.output))}
        ranks = {failure.pid: failure.rank for failure in agent.values()}
        ranks |= {pid: rank for rank, pid in self.pids.items()}
        seen: dict[int, Exit] = {}
        for event in sorted(self._of("exit"), key=lambda one: int(one["t_ns"])):
            pid, at_s = int(event["pid"]), self._seconds(event)
            if pid in seen or (pid != self.launcher and pid not in ranks):
                continue
            told = agent[pid].status if pid in agent else None
            status = told if event.get("status") is None else int(event["status"])
            seen[pid] = Exit(pid=pid, rank=ranks.get(pid), status=status, at_s=at_s, by_us=at_s >= begun_s)
        ended = [*self._missed(agent.values(), seen), *self._left(), *seen.values()]
        yield from sorted(ended, key=lambda exit: exit.at_s)

    def _left(self) -> Iterator[Exit]:
        """Of a job without a guardian of ours: what the onlooker wrote down."""
        for one in self.watched:
            if one["event"] == "left":
                rank, status = int(one["rank"] or 0), one.get("status")
                yield Exit(pid=one.get("pid", 0), rank=rank, status=status, at_s=float(one["t_s"]), by_us=False)

    def _settled_s(self) -> list[float]:
        """When an observed job was settled: whatever ends it after a proof that stands, or a signal, is no cause."""
        standing = [float(one["t_s"]) for one in self.watched if one["event"] == "proof" and "t_s" in one]
        released = [float(one["t_s"]) for one in self.watched if one["event"] == "released" and "t_s" in one]
        asked = self.said("asked_to_end").get("t_s")
        settled = standing[-1:] if standing and max(released, default=-1.0) < standing[-1] else []
        return [*settled, *([float(asked)] if asked is not None else [])]

    def retracted(self) -> Iterator[Retraction]:
        """Each proof with the release that followed it."""
        proof: dict[str, Any] | None = None
        for one in self.watched:
            if one["event"] == "proof":
                proof = one
            elif one["event"] == "released" and proof is not None:
                try:
                    yield adapter(Retraction).validate_python(
                        {
                            "at_s": proof["t_s"],
                            "kind": proof["kind"],
                            "reason": proof["reason"],
                            "quiet_s": one["quiet_s"],
                        }
                    )
                except (KeyError, ValidationError) as error:
                    self._note("a retraction", first_line(error))
                proof = None

    def _missed(self, agent: Iterable[AgentFailure], seen: dict[int, Exit]) -> Iterator[Exit]:
        """Ranks that came and went between two of our looks; the agent tells which of them was the first of all."""
        earliest_s = min((exit.at_s for exit in seen.values()), default=0.0)
        latest_s = max((exit.at_s for exit in seen.values()), default=0.0)
        for failure in agent:
            if failure.pid not in seen:
                at_s = earliest_s if failure.first else latest_s
                yield Exit(pid=failure.pid, rank=failure.rank, status=failure.status, at_s=at_s, by_us=False)

    def teardown_s(self) -> float:
        ended = self._of("ended")
        began = self._of("signal") or ended
        return self._seconds(ended[-1]) - self._seconds(began[0]) if ended else 0.0

    def outlived(self) -> tuple[str, ...]:
        found = (str(one)[:300] for event in self._of("ended") for one in event.get("outlived") or ())
        return tuple(dict.fromkeys(islice(found, _MAX_LEFT)))

    def undead(self) -> tuple[str, ...] | None:
        """As the last guardian saw it; None where none lived to say it."""
        seen = [event["left"] for event in self._of("ended") if "left" in event]
        return tuple(one[:300] for one in seen[-1][:_MAX_LEFT]) if seen else None

    def disk_full(self) -> str | None:
        return next((one["why"][:300] for one in self._of("full") if one.get("why")), None)

    def limits(self, declared: Limits, boards: Iterable[StatusFile | None]) -> Limits:
        """As they were in force at the end; as they are chosen where the watcher did not live to say."""
        said = {key: value for key, value in self.said("limits").items() if key.endswith("_s") and key != "t_s"}
        try:
            return in_force(adapter(Limits).validate_python(said) if said else declared, boards)
        except ValidationError as error:
            self._note("limits", first_line(error))
            return in_force(declared, [])

    def memory(self) -> HostMemory | None:
        said = {key: value for key, value in self.said("memory").items() if key not in ("event", "t_s")}
        try:
            return adapter(HostMemory).validate_python(said) if said else None
        except ValidationError as error:
            self._note("memory", first_line(error))
            return None

    def signals(self) -> tuple[SentSignal, ...]:
        ranks = {pid: rank for rank, pid in self.pids.items()}
        log = self.attempt.door.tail(self.attempt.output)
        return sent_signals(self._of("signal"), log, self.memory(), ranks, self.origin_ns)

    def samples(self) -> Iterator[Sample]:
        count = max(_KEPT_SAMPLES, TURN_SAMPLES * len(self.pids))
        for record in [one for one in self.watched if one.get("event") == "sample"][-count:]:
            try:
                yield adapter(Sample).validate_python({key: record[key] for key in record.keys() & _SAMPLE_KEYS})
            except ValidationError as error:
                self._note("a sample of the watcher", first_line(error))

    def _note(self, what: str, why: str) -> None:
        self.trouble.append(Trouble(what=what, why=why))


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [repr(error)]
    return " ".join(lines[:2])[:300]
