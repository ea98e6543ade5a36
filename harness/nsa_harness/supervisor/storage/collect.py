"""Collects the evidence of one attempt from its files.

Only files in the attempt's directory are read, so the evidence can be collected again later. One fact is the exception:
whether `PYTHONPATH` has a file that hides a package. The result is written to the same directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from nsa_harness import protocol
from nsa_harness.core.collectives.reasons import ledger_lines
from nsa_harness.core.evidence.coverage import Coverage, read_coverage
from nsa_harness.core.evidence.evidence import (
    EarlierError,
    Evidence,
    Exit,
    Frame,
    Hint,
    RaisedException,
    RankEvidence,
    Snapshot,
    StatusFile,
)
from nsa_harness.core.evidence.exit_messages import (
    error_lines,
    known_warnings,
    last_traceback,
    read_background_failures,
    read_debug_message,
    read_exit_messages,
    with_passed_on_errors,
)
from nsa_harness.core.evidence.flight import FlightDump, essential_collectives, missing_numbers, parse_dump
from nsa_harness.core.evidence.gradients import (
    RankTraces,
    compare_bucket_order,
    first_order_difference,
    read_bucket_orders,
    read_orders,
    read_traces,
    trace_lines,
)
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.core.evidence.host import MemoryAtEvent, NcclInfo, read_nccl
from nsa_harness.core.evidence.nodes import merge
from nsa_harness.core.evidence.reduced import (
    COVERAGE_BYTES,
    HISTORIES,
    LEVELS,
    MAX_DETAILED_RANKS,
    MAX_RANK_BYTES,
    history_calls,
    only_ranks,
    rank_with_history,
    reduce_evidence,
    typical_ranks,
    with_history,
    with_short_coverage,
    without_finished_calls,
)
from nsa_harness.core.evidence.stacks import died_in_native_thread, parse_faulthandler
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.evidence.steps import ledger_table, step_rows, step_s
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import HangKind, Trouble
from nsa_harness.core.scenario.observed_job import starts_ranks
from nsa_harness.core.scenario.program import ReadReported
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.supervisor.storage.adapters import evidence_text, read_snapshot
from nsa_harness.supervisor.storage.journals import Journals, first_line
from nsa_harness.supervisor.storage.metrics import as_integer, last_number, number_in, read_table
from nsa_harness.supervisor.storage.rank_files import MAX_HALF_BYTES, copy_probe_files, rank_logs
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.values import FILE as VALUES_FILE

_MAX_BOARD_BYTES = 32 << 20


def step_time_s(attempt: AttemptDir, ranks: int) -> float | None:
    """Return the slowest rank's time per step in seconds, or None if it is unknown."""
    steps_s = []
    for rank in range(ranks):
        with suppress(OSError, ValueError):
            status_file = parse_board(
                attempt.directory.read_whole_file(attempt.rank(rank) / "board", _MAX_BOARD_BYTES), 0
            )
            steps_s.append(step_s(status_file))
    return max((step for step in steps_s if step is not None), default=None)


_MAX_HINTS = 32
_MAX_CHAIN = 8


def raised_exception(rank: int, record: dict[str, Any], origin_ns: int) -> RaisedException:
    """Return the exception that `record` describes. A record with an unexpected structure raises an exception."""
    last, *earlier = (_earlier_error(error) for error in (record, *record.get("chain", ())[:_MAX_CHAIN]))
    exception = RaisedException(
        rank=rank,
        at_s=(int(record["at_ns"]) - origin_ns) / 1e9,
        type=last.type,
        message=last.message,
        frames=last.frames,
        proof=f"rank{rank}/raised.json",
        hints=tuple(_hint(hint) for hint in record.get("hints", ())[:_MAX_HINTS] if isinstance(hint, dict)),
        chain=tuple(earlier),
        is_uncaught=bool(record.get("is_uncaught")),
    )
    return with_passed_on_errors(exception)


def _earlier_error(record: dict[str, Any]) -> EarlierError:
    frames = (
        Frame(file=str(frame["file"]), line=int(frame["line"]), function=str(frame["function"]))
        for frame in record["frames"]
    )
    explicit = bool(record.get("explicit"))
    return EarlierError(
        type=str(record["type"]), message=str(record["message"]), frames=tuple(frames), explicit=explicit
    )


def _hint(record: dict[str, Any]) -> Hint:
    has_location = record.get("file") is not None
    frame = (
        Frame(file=str(record["file"]), line=int(record["line"]), function=str(record["function"]))
        if has_location
        else None
    )
    return Hint(kind=str(record["kind"]), name=str(record["name"]), frame=frame)


_MAX_DOCUMENT_BYTES = 16 << 20
_MAX_TRACE_CHARS = 32 << 20  # limit for all ranks together
_MAX_TROUBLE = 256
_MAX_LINE = 4096
_MAX_GAPS = 8  # gaps in the numbers of a rank's flight recorder
_MAX_TRACE_LINE = 1 << 20
_MAX_ORDER_BYTES = 8 << 20
_STREAMS = ("stdout.log", "stderr.log")
_SIZES = ("rss_bytes", "allocated_bytes", "reserved_bytes")

_RANK_OF_DUMP = re.compile(r"(?=rank([0-9]{1,6})_step)")  # in the name of a memory dump

_Value = TypeVar("_Value")


def collect(attempt: AttemptDir, spec: RunSpec, node: str, read_reported: ReadReported | None = None) -> Evidence:
    """Collect an attempt's evidence from its files, and write it. `read_reported` reads the program's own tables."""
    if names := attempt.nodes():
        whole = _merged(attempt, spec, names, read_reported)
    else:
        whole = _EvidenceCollector(attempt=attempt, spec=spec).evidence(node, read_reported)
    evidence, text = reduce_to_limit(attempt.redaction.value(whole))
    try:
        attempt.directory.make_directory(attempt.evidence)
        attempt.directory.write(attempt.evidence / f"{node}.json", text)
    except OSError as error:
        evidence = replace(evidence, trouble=(*evidence.trouble, Trouble(what="evidence", why=first_line(error))))
    return evidence


def _merged(attempt: AttemptDir, spec: RunSpec, names: Sequence[str], read_reported: ReadReported | None) -> Evidence:
    """Return the merged evidence of an attempt that was observed by an agent on each of several nodes.

    `read_reported` reads the program's own tables, which all nodes share, so they are read once.
    """
    views = {name: attempt.with_files_of(name) for name in names}
    ranks = {name: set(Journals(attempt=view).pids) for name, view in views.items()}
    unseen = set(range(spec.ranks)).difference(*ranks.values())
    ranks[names[0]] |= unseen
    for name, own in ranks.items():
        for rank in own - unseen:
            _copy_values(attempt, name, rank)
    parts = {
        name: _EvidenceCollector(attempt=view, spec=spec, ranks=tuple(sorted(ranks[name]))).evidence(
            name, read_reported if name == names[0] else None
        )
        for name, view in views.items()
    }
    expected = next((one for one in attempt.directory.read_records(attempt.watch) if one.get("event") == "nodes"), {})
    return merge(parts, int(expected.get("expected") or 0), tuple(map(str, expected.get("names") or ())))


def _copy_values(attempt: AttemptDir, node: str, rank: int) -> None:
    """Copy the values that a node's agent has read from a rank to the rank's directory."""
    source = attempt.node(node).rank(rank) / VALUES_FILE
    with suppress(OSError):
        if attempt.directory.exists(source):
            attempt.directory.make_directory(attempt.rank(rank))
            attempt.directory.copy_ends(source, attempt.rank(rank) / VALUES_FILE, MAX_HALF_BYTES)


def reduce_to_limit(evidence: Evidence) -> tuple[Evidence, str]:
    """Reduce evidence to the size limit, but keep its proof of a HANG. Return it and its JSON text.

    If there are more than `MAX_DETAILED_RANKS` ranks, all are judged, but the text has only some of each kind.
    """
    if len(evidence.ranks) > MAX_DETAILED_RANKS:
        text = reduce_to_limit(only_ranks(evidence, typical_ranks(evidence, MAX_DETAILED_RANKS)))[1]
        return with_short_coverage(evidence), text
    limit_bytes = MAX_RANK_BYTES * min(max(1, evidence.world_size), MAX_DETAILED_RANKS)
    evidence = with_short_coverage(evidence)
    limit_bytes += COVERAGE_BYTES * sum(rank.coverage is not None for rank in evidence.ranks)
    result, text = evidence, ""
    for calls in HISTORIES:
        result = with_history(evidence, calls)
        text = evidence_text(result)
        if len(text.encode()) <= limit_bytes:
            return result, text
    proven_kind = _proven_kind(evidence)
    for level in LEVELS:
        smaller = reduce_evidence(evidence, level)
        if len(text.encode()) <= limit_bytes or _proven_kind(smaller) != proven_kind:
            break
        result, text = smaller, evidence_text(smaller)
    return result, text


def _without_shared_traceback(ranks: tuple[RankEvidence, ...]) -> tuple[RankEvidence, ...]:
    """Return the ranks without a traceback that only the log of all ranks shows, if another rank recorded it.

    Without a log for each rank, the log of the command counts as the log of rank 0.
    """
    recorded = {error.message for rank in ranks if (error := rank.exception) and error.at_s is not None}
    return tuple(
        replace(rank, exception=None)
        if rank.exception and rank.exception.at_s is None and rank.exception.message in recorded
        else rank
        for rank in ranks
    )


def _without_most_strangers(exits: Iterable[Exit], ranks: int) -> Iterator[Exit]:
    """Yield the exits. Of ranks that the job does not have, a journal may name many, so only some exits are kept."""
    strangers = 0
    for exit in exits:
        is_stranger = exit.rank is not None and exit.rank >= ranks
        strangers += is_stranger
        if not is_stranger or strangers <= _MAX_STRANGERS:
            yield exit


_MAX_STRANGERS = 1024

_NOT_A_PACKAGE = re.compile(r"No module named '[\w.]+'; '(\w+)' is not a package")


def find_hiding_file(lines: Iterable[str], python_path: str) -> str:
    """Return the file in `python_path` that the launcher imported instead of a package, or "" if there is none."""
    modules = [match[1] for line in lines if (match := _NOT_A_PACKAGE.search(line))]
    files = (Path(entry) / f"{module}.py" for module in modules for entry in python_path.split(os.pathsep) if entry)
    return next((str(file) for file in files if file.is_file()), "")


def _step_number(path: Path) -> int:
    """Return the step number in a file name, such as 20 for "mem_rank0_step20.json", or -1 if there is none."""
    digits = path.stem.rpartition("step")[2]
    return int(digits) if digits.isdecimal() else -1


def _limit_trouble(trouble: Iterator[Trouble]) -> tuple[Trouble, ...]:
    first_notes = tuple(islice(trouble, _MAX_TROUBLE))
    more = sum(1 for _ in trouble)
    return (*first_notes, Trouble(what="trouble", why=f"{more} further notes are not listed")) if more else first_notes


def _proven_kind(evidence: Evidence) -> HangKind | None:
    proof = judge(evidence).proof
    return proof.kind if proof else None


@dataclass(kw_only=True)
class _EvidenceCollector:
    attempt: AttemptDir
    spec: RunSpec
    ranks: Sequence[int] = ()  # the ranks to collect; () = all ranks of the job
    trouble: list[Trouble] = field(default_factory=list)
    trace_lines: list[str] = field(default_factory=list)  # lines of the programs' own traces, of all ranks

    def __post_init__(self) -> None:
        self.directory = self.attempt.directory
        self._trace_chars = _MAX_TRACE_CHARS
        self.ranks = self.ranks or range(self.spec.ranks)
        self.journals = Journals(attempt=self.attempt, trouble=self.trouble)
        self._logs = rank_logs(self.attempt)

    def evidence(self, node: str, read_reported: ReadReported | None) -> Evidence:
        """Read all files of the attempt, and return its evidence."""
        journals = self.journals
        metrics, rows = (
            read_reported(lambda name: read_table(self.directory, self.attempt.path / name, self._note))
            if read_reported
            else ({}, ())
        )
        exits = tuple(_without_most_strangers(journals.exits(), self.spec.ranks))
        ending = journals.last_record("ending")
        exit_of = {exit.rank: exit for exit in reversed(exits)}
        ranks = tuple(self._rank(rank, exit_of.get(rank)) for rank in self.ranks)
        if not self.directory.exists(self.attempt.logs):
            ranks = _without_shared_traceback(ranks)
        if any(self.directory.is_file(self.attempt.rank(rank) / "stdout.log") for rank in self.ranks):
            self._write(self.attempt.traces, self.trace_lines)
        if ledgers := {rank.rank: rank.ledger for rank in ranks if rank.ledger}:
            self._write(self.attempt.path / "step_ledger.txt", ledger_table(ledgers))
        last_lines: tuple[str, ...] = ()
        if not any(rank.pid for rank in ranks):
            last_lines = error_lines(self.directory.read_tail(self.attempt.output))
        ended_s = float(ending.get("t_s") or max((exit.at_s for exit in exits), default=0.0))
        return Evidence(
            node=node,
            world_size=self.spec.ranks,
            backend=self.spec.backend,
            ending=journals.ending(),
            limits=journals.limits(self.spec.limits, [rank.status_file for rank in ranks]),
            ended_s=ended_s,
            launch_s=journals.last_record("started").get("t_s"),
            teardown_s=journals.teardown_s(),
            launcher=next((replace(exit, rank=None) for exit in exits if exit.pid == journals.launcher_pid), None),
            launcher_error=ending.get("error"),
            last_lines=last_lines,
            hiding_file=find_hiding_file(
                last_lines, dict(self.spec.env).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            ),
            ranks=ranks,
            exits=exits,
            snapshots=tuple(self._snapshots()),
            samples=tuple(journals.samples()),
            last_progress_s=ending.get("last_progress_s"),
            leftovers=journals.leftovers(),
            unkillable=journals.unkillable(),
            metrics=metrics,
            trouble=_limit_trouble(self._all_trouble()),
            signals=journals.signals(),
            memory=journals.memory(),
            network=journals.network(),
            retractions=tuple(journals.retractions()),
            gradient_order=first_order_difference(self._gradient_orders(read_orders)),
            bucket_order=compare_bucket_order(self._gradient_orders(read_bucket_orders)),
            launcher_reports_ranks=self.spec.launcher is not Launcher.PLAIN or starts_ranks(self.spec.program),
            is_observed=bool(journals.last_record("observed")),
            is_attached=bool(journals.last_record("attached")),
            program_records=rows,
            disk_full=journals.full_disk_text(),
            nccl=self._nccl(),
        )

    # Ranks.

    def _snapshots(self) -> list[Snapshot]:
        paths = self.directory.list_files(self.attempt.dumps, "snapshot*.json")
        limit_bytes = _MAX_DOCUMENT_BYTES + self.spec.ranks * MAX_RANK_BYTES
        read = (self._read(path, read_snapshot, limit_bytes=limit_bytes) for path in paths)
        return sorted(
            (without_finished_calls(snapshot) for snapshot in read if snapshot is not None),
            key=lambda snapshot: snapshot.number,
        )

    def _rank(self, rank: int, exit: Exit | None) -> RankEvidence:
        rank_dir = self.attempt.rank(rank)
        pid = self.journals.pids.get(rank)
        for error in copy_probe_files(self.attempt, rank, pid, self._logs):
            self._note(rank_dir.name, first_line(error), rank)
        status_file = self._status_file(rank_dir, rank, pid)
        if status_file is not None:
            self._write(rank_dir / "calls.txt", ledger_lines(status_file), rank)
        errors = self.directory.read_tail(rank_dir / "stderr.log")
        exception = self._exception(rank, rank_dir, errors)
        death_text = self.directory.read_tail(rank_dir / "stacks.txt")
        flight = self._flight(rank_dir, rank)
        collectives = flight.collectives if flight else ()
        for group, first, last in islice(missing_numbers(collectives), _MAX_GAPS):
            self._note("flight recorder", f"collectives {first} to {last} of group {group} are missing", rank)
        if status_file is not None and flight is not None:
            status_file = replace(status_file, groups={**flight.groups, **status_file.groups})
        heartbeats = list(self.directory.read_records(self.attempt.path / f"heartbeat_rank{rank}.jsonl"))
        if not heartbeats and status_file is not None:
            self._write_heartbeat(rank, status_file)
        evidence = RankEvidence(
            rank=rank,
            pid=pid,
            has_log=self.directory.exists(self.attempt.logs) and self.directory.is_file(rank_dir / "stdout.log"),
            exit=exit,
            exception=exception,
            status_file=status_file,
            collectives=essential_collectives(collectives, HISTORIES[0]),
            death_stacks=parse_faulthandler(death_text),
            died_in_native_thread=died_in_native_thread(death_text),
            peak_rss_bytes=self.journals.peaks.get(str(rank)),
            peak_gpu_bytes=as_integer(last_number(heartbeats, "gpu_peak_bytes")),
            traces=self._traces(rank, rank_dir),
            last_loss=last_number(heartbeats, "loss"),
            error_lines=error_lines(errors),
            # The whole log is searched, because Python prints a warning only once, near the beginning.
            warnings=known_warnings(self.directory.read_lines(rank_dir / "stderr.log", _MAX_LINE)),
            ledger=step_rows(status_file, collectives) if status_file else (),
            planned_steps=as_integer(last_number(heartbeats, "of_steps")),
            memory=tuple(self._memory(rank, heartbeats)),
            debug_message=read_debug_message(errors),
            health=self._health_samples(rank_dir, rank),
            exit_messages=read_exit_messages(errors),
            background_failures=read_background_failures(errors, exception),
            coverage=self._coverage(rank_dir, rank),
        )
        return rank_with_history(evidence, history_calls(len(self.ranks)))

    def _memory(self, rank: int, heartbeats: Sequence[dict[str, Any]]) -> Iterator[MemoryAtEvent]:
        """Yield the memory use of a rank at startup, at its latest memory dump and at its latest heartbeat."""
        with_memory = [heartbeat for heartbeat in heartbeats if number_in(heartbeat, "rss_bytes") is not None]
        boot = next((heartbeat for heartbeat in reversed(with_memory) if heartbeat.get("phase") == "start"), None)
        latest_dump = max(self._memory_dumps.get(rank, ()), key=_step_number, default=None)
        dump = None if latest_dump is None else self._read(latest_dump, json.loads, rank)
        last = with_memory[-1] if with_memory and with_memory[-1] is not boot else None
        for moment, record in (("boot", boot), ("dump", dump), ("last", last)):
            step = as_integer(number_in(record, "step")) if isinstance(record, dict) else None
            if isinstance(record, dict) and step is not None:
                sizes = {name: as_integer(number_in(record, name)) for name in _SIZES}
                yield MemoryAtEvent(moment=moment, step=step, **sizes)

    @cached_property
    def _memory_dumps(self) -> dict[int, list[Path]]:
        """The memory dumps of each rank."""
        paths: dict[int, list[Path]] = {}
        for path in self.directory.list_files(self.attempt.path, "mem*rank*_step*.json"):
            for rank in {int(rank) for rank in _RANK_OF_DUMP.findall(path.name)}:
                paths.setdefault(rank, []).append(path)
        return paths

    def _nccl(self) -> NcclInfo | None:
        rank_dirs = {rank: self.attempt.rank(rank) for rank in self.ranks}
        return read_nccl(
            {
                rank: chain.from_iterable(self.directory.read_lines(rank_dir / name, _MAX_LINE) for name in _STREAMS)
                for rank, rank_dir in rank_dirs.items()
            }
        )

    def _status_file(self, rank_dir: Path, rank: int, pid: int | None) -> StatusFile | None:
        path = rank_dir / "board"
        if not self.directory.exists(path):
            no_process = "no process of the rank was found while it was running, and no status file has this rank"
            not_written = "it was not written: the probe is off, or the program is not Python with torch"
            self._note("status file", no_process if pid is None else not_written, rank)
            return None
        return self._read(path, lambda raw: parse_board(raw, self.journals.origin_ns), rank)

    def _flight(self, rank_dir: Path, rank: int) -> FlightDump | None:
        paths = (rank_dir / "flight.json", self.attempt.probe_files / protocol.NCCL_DUMP.format(rank=rank))
        path = next((path for path in paths if self.directory.exists(path)), None)
        return None if path is None else self._read(path, parse_dump, rank)

    def _coverage(self, rank_dir: Path, rank: int) -> Coverage | None:
        path = rank_dir / "coverage"
        if not self.directory.exists(path):
            return None
        return self._read(path, lambda raw: read_coverage(raw, self.journals.origin_ns), rank)

    def _health_samples(self, rank_dir: Path, rank: int) -> HealthSamples | None:
        try:
            return read_health_samples(self.directory.read_records(rank_dir / "looks.jsonl"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._note("looks.jsonl", repr(error), rank)
            return None

    def _exception(self, rank: int, rank_dir: Path, errors: str) -> RaisedException | None:
        path = rank_dir / "raised.json"
        record = self._read(path, json.loads, rank) if self.directory.exists(path) else None
        if isinstance(record, dict):
            try:
                return raised_exception(rank, record, self.journals.origin_ns)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                self._note("raised.json", repr(error), rank)
        traceback = last_traceback(errors)
        if traceback is None:
            return None
        kind, message, frames = traceback
        return RaisedException(
            rank=rank, at_s=None, type=kind, message=message, frames=frames, proof=f"{rank_dir.name}/stderr.log"
        )

    def _traces(self, rank: int, rank_dir: Path) -> RankTraces:
        output_lines = self.directory.read_lines(rank_dir / "stdout.log", _MAX_TRACE_LINE)
        lines = list(self._within_bound(trace_lines(line.rstrip("\n") for line in output_lines), rank_dir))
        self.trace_lines += [f"[rank{rank}] {line}" for line in lines]
        return read_traces(lines)

    def _within_bound(self, lines: Iterable[str], rank_dir: Path) -> Iterator[str]:
        for line in lines:
            self._trace_chars -= len(line) + 1
            if self._trace_chars < 0:
                self.directory.note_incomplete(
                    rank_dir / "stdout.log", f"only the first {_MAX_TRACE_CHARS >> 20} MiB of all traces are stored"
                )
                return
            yield line

    def _write_heartbeat(self, rank: int, status_file: StatusFile) -> None:
        lines = [
            json.dumps({"step": step, "t_s": round(at_s, 4), "source": "board"}) for step, at_s in status_file.steps_s
        ]
        if lines:
            self._write(self.attempt.path / f"heartbeat_rank{rank}.jsonl", lines, rank)

    # Numbers and trouble.

    def _gradient_orders(
        self, read: Callable[[Iterable[dict[str, Any]]], dict[int, tuple[str, ...]]]
    ) -> dict[int, dict[int, tuple[str, ...]]]:
        """Return, for each rank, the order in which its gradients became ready in each step."""
        paths = {rank: self.attempt.path / f"grad_order_rank{rank}.jsonl" for rank in self.ranks}
        return {
            rank: read(self.directory.read_records(path))
            for rank, path in paths.items()
            if self.directory.is_file(path) and self.directory.size_bytes(path) <= _MAX_ORDER_BYTES
        }

    def _all_trouble(self) -> Iterator[Trouble]:
        yield from self.directory.take_notes()
        yield from self.trouble
        for record in self.journals.watch_records + self.journals.process_records:
            if record.get("event") == "trouble":
                yield Trouble(what=str(record.get("what")), why=str(record.get("why")), rank=record.get("rank"))
        for rank in (rank for rank in self.ranks if rank in self.journals.pids):
            for record in self.directory.read_records(self.attempt.rank(rank) / "trouble.jsonl"):
                yield Trouble(what=f"probe: {record.get('piece')}", why=str(record.get("error"))[:500], rank=rank)

    def _read(
        self,
        path: Path,
        parse: Callable[[bytes], _Value],
        rank: int | None = None,
        *,
        limit_bytes: int = _MAX_DOCUMENT_BYTES,
    ) -> _Value | None:
        try:
            return parse(self.directory.read_whole_file(path, limit_bytes))
        except (OSError, ValueError, RecursionError) as error:
            self._note(path.name, first_line(error), rank)
            return None

    def _write(self, path: Path, lines: Iterable[str], rank: int | None = None) -> None:
        """Write lines to a file, with secrets removed. If that fails, record the failure."""
        try:
            self.directory.write(path, self.attempt.redaction.text("".join(f"{line}\n" for line in lines)))
        except OSError as error:
            self._note(path.name, first_line(error), rank)

    def _note(self, source: str, reason: str, rank: int | None = None) -> None:
        self.trouble.append(Trouble(what=source, why=reason, rank=rank))
