"""Derive the evidence about a job from the logs and dumps that it left behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from nsa_harness.core.evidence.evidence import (
    Collective,
    Ending,
    Evidence,
    Exit,
    RaisedException,
    RankEvidence,
    RankSnapshot,
    Snapshot,
    Stack,
)
from nsa_harness.core.evidence.exit_messages import (
    agent_failures,
    closing_signals,
    error_lines,
    is_from_outside,
    known_warnings,
    last_traceback,
    read_background_failures,
    read_debug_message,
    read_exit_messages,
    timeout_message,
    with_passed_on_errors,
)
from nsa_harness.core.evidence.flight import FlightDump, essential_collectives
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.evidence.host import HostMemory, SentSignal
from nsa_harness.core.evidence.job_files import (
    EMPTY,
    MAX_RANKS,
    JobFile,
    JobFileKind,
    JobLog,
    by_rank,
    exits_of_tasks,
    find_rank,
    find_world_size,
    is_launcher_text,
    killed_for_memory,
    mismatched_collectives,
    rank_of_path,
    timeouts,
    watchdog_lines,
    watchdog_reports,
)
from nsa_harness.core.evidence.stacks import parse_faulthandler
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Trouble

_UNNAMED_RANK = "it does not say of which rank it is: it is taken for one of the ranks, and called rank {} here"
_TRACEBACK = "Traceback (most recent call last):\n"
_MAX_SHORT_PARTS = 8  # parts of a path that a shortened file name may have
_FATAL_ERROR = re.compile(r"^Fatal Python error: ", re.M)
_LAUNCHER = ("ChildFailedError", "SignalException")  # torchrun's own exceptions: a rank failed, or a signal came


@dataclass(kw_only=True)
class _Rank:
    """The logs, stacks and other contents of a job's files that belong to one rank."""

    texts: list[tuple[str, str]] = field(default_factory=list)  # (file, text of the rank in it)
    stacks: tuple[Stack, ...] = ()
    children: dict[int, tuple[Stack, ...]] = field(default_factory=dict)  # stacks of child processes, by process id
    stacks_file: str = ""  # the file with the stacks
    recorder: FlightDump | None = None
    recorder_file: str = ""
    collectives: tuple[Collective, ...] = ()  # from messages of NCCL's watchdog
    mismatch: Collective | None = None  # the rank's call in a mismatch that TORCH_DISTRIBUTED_DEBUG=DETAIL reports
    pid: int = 0  # 0 = unknown
    exit: Exit | None = None

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The evidence about a job that was not watched, derived from the job's files."""

    evidence: Evidence
    files: Mapping[str, str]  # a file as diagnosis rules cite it -> the job's file that was read instead
    missing: tuple[MissingData, ...]
    script: str  # the program, according to torchrun's messages; empty = unknown


def read_post_mortem(files: Sequence[JobFile], node: str) -> PostMortem:
    """Return the evidence in the files of a job on `node`, whatever they contain."""
    return _Merge(files=sorted(files, key=lambda file: (file.changed_ns, file.name)), node=node).merge()


@dataclass(kw_only=True)
class _Merge:
    """An assignment of the contents of a job's files to ranks, from which the evidence is derived."""

    files: Sequence[JobFile]  # oldest first
    node: str
    ranks: dict[int, _Rank] = field(default_factory=dict)
    launcher: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)

    def merge(self) -> PostMortem:
        latest = _latest_attempts(self.files)
        logs = [file for file in latest if file.kind is JobFileKind.LOG]
        self.rank_of_file = _numbered_ranks(file.name for file in logs)
        split_logs = [(file, by_rank(file.text)) for file in logs]
        local = {local_rank: rank for _, log in split_logs for local_rank, rank in log.local.items()}
        for file, log in split_logs:
            self._take_log(file, log, local)
        everything = "\n".join(text for _, text in self.launcher)
        self.failures = agent_failures(everything)
        self._take_exits(everything)
        self._take_watchdogs([text for _, text in self._all_texts()])
        pids = {failure.pid: failure.rank for failure in self.failures}
        for file in latest:
            self._take_dump(file, pids)
        self._take_orphans()
        return self._post_mortem(everything)

    def _files_of(self, rank: int) -> _Rank:
        return self.ranks.setdefault(rank, _Rank())

    # Logs.

    def _take_log(self, file: JobFile, log: JobLog, local: Mapping[int, int]) -> None:
        """Assign each line of a log to its rank or to the launcher. `local` maps local ranks to global ranks."""
        default_owner = self._owner(file, log, local)
        for rank, lines in log.lines.items():
            text = "\n".join(lines)
            if not text.strip():
                continue
            owner = rank if rank is not None else default_owner
            # Lines that srun labels may come from torchrun itself, one per node.
            if owner is None or (rank is not None and is_launcher_text(text)):
                self.launcher.append((file.name, text))
            else:
                self._files_of(owner).texts.append((file.name, text))

    def _owner(self, file: JobFile, log: JobLog, local: Mapping[int, int]) -> int | None:
        """Return the rank that printed the lines of a log that have no rank label, or None for the launcher."""
        ranks = [rank for rank in log.lines if rank is not None]
        path, text = rank_of_path(file.name), "\n".join(log.lines.get(None, ()))
        if path.local is not None:
            return ranks[0] if len(ranks) == 1 else local.get(path.local, path.local)
        if is_launcher_text(text) or len(ranks) > 1:
            return None
        if path.rank is not None:
            return path.rank
        printed_rank = find_rank(text)
        owner = printed_rank if printed_rank is not None else next(iter(ranks), None)
        return owner if owner is not None else self.rank_of_file.get(file.name)

    def _all_texts(self) -> Iterator[tuple[str, str]]:
        yield from self.launcher
        for rank in self.ranks.values():
            yield from rank.texts

    # Messages of launchers.

    def _take_exits(self, text: str) -> None:
        """Store the exit status of each rank that the launcher's output reports."""
        began = min((_seconds(stamp) for stamp in re.findall(_TIME, text)), default=0.0)
        for failure in self.failures:
            # The summary has whole seconds. The half second keeps the failure that torchrun saw first in front.
            at_s = max(0.0, _time_of(text, failure.pid) - began) + (0.0 if failure.first else 0.5)
            self._files_of(failure.rank).exit = Exit(
                pid=failure.pid, rank=failure.rank, status=failure.status, at_s=at_s, during_teardown=False
            )
            self._files_of(failure.rank).pid = failure.pid
        for rank, status in () if self.failures else exits_of_tasks(text):
            self._files_of(rank).exit = Exit(pid=0, rank=rank, status=status, at_s=0.0, during_teardown=False)

    def _take_watchdogs(self, texts: Iterable[str]) -> None:
        """Store the collectives that NCCL's watchdog or torch reports in the given logs."""
        text = "\n".join(texts)
        timed_out = timeouts(text)
        for rank, collective in timed_out:
            self._files_of(rank).collectives += (collective,)
        for rank, collective in mismatched_collectives(text):
            self._files_of(rank).mismatch = collective
        by_number = {(collective.group, collective.seq): collective for _, collective in timed_out}
        for report in watchdog_reports(text):
            own = self._files_of(report.rank).collectives
            if any(collective.group == report.group for collective in own):
                continue
            # This rank has no timeout in the group. It is in a call in which others timed out, or has completed it.
            enqueued = [
                collective
                for (group, seq), collective in by_number.items()
                if group == report.group and seq <= report.enqueued
            ]
            open_ = tuple(collective for collective in enqueued if collective.seq > report.completed)
            self._files_of(report.rank).collectives += open_ or (_completed_call(report.group, report.completed),)

    # Dumps.

    def _take_dump(self, file: JobFile, pids: Mapping[int, int]) -> None:
        """Assign a stack dump or a recorder dump to its rank. `pids` maps process ids to ranks."""
        if file.kind not in (JobFileKind.RECORDER, JobFileKind.STACKS):
            return
        path = rank_of_path(file.name)
        by_pid = next((pids[pid] for pid in file.stacks if pid in pids), None)
        number = path.number if path.number is not None and path.number < MAX_RANKS else None
        path_rank = path.rank if path.rank is not None else path.local
        by_name = path_rank if path_rank is not None else pids.get(path.number or -1, number)
        rank = by_pid if by_pid is not None else by_name
        printed_rank = find_rank(file.text) if rank is None else None
        self._store_dump(file, rank if rank is not None else printed_rank)

    def _store_dump(self, file: JobFile, rank: int | None) -> None:
        """Store a dump as that of `rank` or, if this is None, of the lowest rank without files."""
        if rank is None:
            rank = self._free_rank()
            self.trouble.append(Trouble(what=file.name, why=_UNNAMED_RANK.format(rank)))
        own = self._files_of(rank)
        if file.recorder is not None:
            # Only pickled dumps have frames, so a JSON dump does not replace a pickled one.
            if own.recorder is None or file.recorder.frames or not own.recorder.frames:
                own.recorder, own.recorder_file = file.recorder, file.name
            return
        (pid, stacks), *children = file.stacks.items()
        own.stacks, own.stacks_file, own.children = stacks, file.name, dict(children)
        own.pid = pid or own.pid

    def _take_orphans(self) -> None:
        """Assign each log that names no rank, but contains a traceback or a stack dump, to a rank."""
        for name, text in list(self.launcher):
            if is_launcher_text(text):
                self._take_launcher_traceback(name, text)
            elif last_traceback(text) or parse_faulthandler(text):
                self.launcher.remove((name, text))
                self._store_text(name, text, self._free_rank())

    def _take_launcher_traceback(self, name: str, text: str) -> None:
        """Assign the first traceback in torchrun's output to the rank that failed first."""
        first = next((failure.rank for failure in self.failures if failure.first), None)
        parts = (f"{_TRACEBACK}{part}" for part in text.split(_TRACEBACK)[1:])
        tracebacks = (
            part for part in parts if (exception := last_traceback(part)) and not exception[0].endswith(_LAUNCHER)
        )
        traceback = next(tracebacks, None)
        if traceback is not None and first is not None and not last_traceback(self._files_of(first).text):
            self._store_text(name, traceback, first)

    def _store_text(self, name: str, text: str, rank: int) -> None:
        self.trouble.append(Trouble(what=name, why=_UNNAMED_RANK.format(rank)))
        self._files_of(rank).texts.append((name, text))

    def _free_rank(self) -> int:
        return next(number for number in range(MAX_RANKS + 1) if number not in self.ranks)

    # The evidence.

    def _post_mortem(self, launcher_text: str) -> PostMortem:
        everything = "\n".join((launcher_text, *(rank.text for rank in self.ranks.values())))
        names = _full_names(self.ranks.values())
        for rank in self.ranks.values():
            rank.stacks = tuple(_with_full_names(stack, names) for stack in rank.stacks)
        groups = {
            name: members
            for rank in self.ranks.values()
            if rank.recorder
            for name, members in rank.recorder.groups.items()
        }
        reported_size = max(
            [find_world_size(everything), *(rank + 1 for members in groups.values() for rank in members)], default=0
        )
        size = max([reported_size if reported_size <= MAX_RANKS else 0, *(rank + 1 for rank in self.ranks), 1])
        ranks = tuple(_rank_evidence(rank, self.ranks.get(rank, _Rank())) for rank in range(size))
        exits = tuple(sorted((rank.exit for rank in ranks if rank.exit), key=lambda exit: exit.at_s))
        snapshots = tuple(
            snapshot for rank in ranks if (snapshot := _snapshot(rank, self.ranks.get(rank.rank, _Rank()))) is not None
        )
        closing = closing_signals(launcher_text)
        evidence = Evidence(
            node=self.node,
            world_size=size,
            backend=_backend(everything),
            ending=Ending.POST_MORTEM,
            limits=Limits(),
            ended_s=max((exit.at_s for exit in exits), default=0.0),
            launch_s=None,
            teardown_s=0.0,
            launcher=_launcher(closing),
            launcher_error=None,
            ranks=ranks,
            exits=exits,
            snapshots=(Snapshot(number=1, at_s=0.0, ranks=snapshots),) if snapshots else (),
            samples=(),
            last_progress_s=None,
            leftovers=(),
            unkillable=None,
            metrics={},
            trouble=(),
            signals=tuple(
                SentSignal(pid=pid, rank=self._rank_of(pid), signal=signal, sender=sender, at_s=None)
                for pid, signal, sender in closing
            ),
            memory=_memory(everything),
            is_observed=True,
            last_lines=error_lines(launcher_text),
            groups=groups,
        )
        return PostMortem(
            evidence=replace(evidence, trouble=(*self.trouble, *_unused_files(self.files))),
            files=self._proofs(),
            missing=tuple(_missing(evidence, self.ranks, self.files)),
            script=_script(launcher_text),
        )

    def _rank_of(self, pid: int) -> int | None:
        return next((failure.rank for failure in self.failures if failure.pid == pid), None)

    def _proofs(self) -> dict[str, str]:
        """Map each file name that a diagnosis can cite as proof to the corresponding file of this job."""
        proofs: dict[str, str] = {}
        for rank, files in self.ranks.items():
            logs = [name for name, text in files.texts if last_traceback(text)] or [name for name, _ in files.texts]
            proofs |= {f"rank{rank}/stderr.log": logs[-1]} if logs else {}
            proofs |= {f"rank{rank}/stacks.txt": files.stacks_file or logs[-1]} if files.stacks_file or logs else {}
            proofs |= {f"rank{rank}/flight.json": files.recorder_file} if files.recorder_file else {}
        for name, _ in self.launcher:
            proofs |= dict.fromkeys(("output.log", "processes.jsonl"), name)
        return proofs


def _numbered_ranks(names: Iterable[str]) -> dict[str, int]:
    """Return the rank of each log in a series such as "job_0.out", "job_1.out"."""
    series: dict[str, dict[str, int]] = {}
    for name in names:
        number = rank_of_path(name).number
        if number is not None and number < MAX_RANKS:
            series.setdefault(re.sub(r"\d+(?=\D*$)", "#", name), {})[name] = number
    return {name: number for ranks in series.values() if len(ranks) > 1 for name, number in ranks.items()}


def _latest_attempts(files: Sequence[JobFile]) -> list[JobFile]:
    """Return the files without those from attempts that torchrun has since restarted."""
    paths = {file.name: rank_of_path(file.name) for file in files}
    last: dict[str, int] = {}
    for path in paths.values():
        if path.local is not None:
            last[path.launch] = max(path.attempt, last.get(path.launch, 0))
    return [
        file
        for file in files
        if paths[file.name].local is None or paths[file.name].attempt == last[paths[file.name].launch]
    ]


def _rank_evidence(rank: int, files: _Rank) -> RankEvidence:
    log = files.text
    exception = _exception(rank, files)
    fatal = _FATAL_ERROR.search(log)
    lines = (*error_lines(log), *watchdog_lines(log)) if log else ()
    return RankEvidence(
        rank=rank,
        pid=files.pid or None,
        exit=files.exit,
        exception=with_passed_on_errors(exception) if exception else None,
        status_file=None,
        collectives=_collectives(files),
        death_stacks=parse_faulthandler(log[fatal.start() :]) if fatal else (),
        peak_rss_bytes=None,
        peak_gpu_bytes=None,
        traces=RankTraces(gradient_count=None, missing_count=None, missing_parameters=(), buckets=()),
        last_loss=None,
        error_lines=tuple(dict.fromkeys(lines)),
        warnings=known_warnings(log.splitlines()),
        debug_message=read_debug_message(log),
        exit_messages=read_exit_messages(log),
        background_failures=read_background_failures(log, exception),
        last_line=next((line.strip() for line in reversed(log.splitlines()) if line.strip()), ""),
    )


def _exception(rank: int, files: _Rank) -> RaisedException | None:
    """Return the last exception in a rank's logs, or None if there is none."""
    for _, text in reversed(files.texts):
        traceback = last_traceback(text)
        if traceback and not traceback[0].endswith(_LAUNCHER):
            kind, message, frames = traceback
            return RaisedException(
                rank=rank, at_s=None, type=kind, message=message, frames=frames, proof=f"rank{rank}/stderr.log"
            )
    return None


def _collectives(files: _Rank) -> tuple[Collective, ...]:
    """Return the collectives that a rank entered, read from its dump or its logs."""
    if files.recorder is None:
        return files.collectives or ((files.mismatch,) if files.mismatch else ())
    frames = files.recorder.frames
    collectives = essential_collectives(files.recorder.collectives)
    return tuple(
        replace(collective, frames=frames.get((collective.group, collective.seq), ())) for collective in collectives
    )


def _snapshot(rank: RankEvidence, files: _Rank) -> RankSnapshot | None:
    """Return a rank's last known state, from its dump or the traceback of a timeout in a wait, or None."""
    stacks, proof = files.stacks, "stacks.txt"
    text = files.text
    if not stacks and not _FATAL_ERROR.search(text):
        stacks = parse_faulthandler(text)
    if not stacks and rank.exception and rank.exception.frames and timeout_message(rank):
        proof = "stderr.log"
        stacks = (Stack(thread="MainThread", tid=None, active=False, frames=rank.exception.frames, source="traceback"),)
    has_collectives = files.recorder is not None or bool(files.collectives)
    if not stacks and not has_collectives:
        return None
    return RankSnapshot(
        rank=rank.rank,
        pid=files.pid,
        process=None,
        stacks=stacks,
        child_stacks=files.children,
        collectives=rank.collectives if has_collectives else (),
        proof=f"rank{rank.rank}/{proof}" if stacks else f"rank{rank.rank}/flight.json",
        is_from_dump=True,
    )


def _full_names(ranks: Iterable[_Rank]) -> dict[str, str]:
    """Map each file name that py-spy has shortened in a stack to the full file name."""
    full = {
        frame.file
        for rank in ranks
        for frames in (
            *((rank.recorder.frames.values()) if rank.recorder else ()),
            *(stack.frames for stack in rank.stacks),
            *(traceback[2] for traceback in map(last_traceback, [text for _, text in rank.texts]) if traceback),
        )
        for frame in frames
        if frame.file.startswith("/")
    }
    candidates: dict[str, set[str]] = {}
    for file in full:
        parts = file.split("/")
        for count in range(1, min(len(parts), _MAX_SHORT_PARTS)):
            candidates.setdefault("/".join(parts[-count:]), set()).add(file)
    return {short: files.pop() for short, files in candidates.items() if len(files) == 1}


def _with_full_names(stack: Stack, names: Mapping[str, str]) -> Stack:
    return replace(
        stack, frames=tuple(replace(frame, file=names.get(frame.file, frame.file)) for frame in stack.frames)
    )


def _completed_call(group: str, seq: int) -> Collective:
    return Collective(
        group=group, seq=seq, op="collective", sizes=(), dtypes=(), retired=True, created_ns=max(seq, 0), started=True
    )


_TIME = r"time\s*:\s*(\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)"
_TIME_FORM = "%Y-%m-%d_%H:%M:%S"


def _time_of(text: str, pid: int) -> float:
    """Return the time at which process `pid` failed, in seconds since 1970, or 0 if unknown."""
    blocks = (f"time{block}" for block in reversed(text.split("time")) if f"(pid: {pid})" in block)
    stamp = re.match(_TIME, next(blocks, ""))
    return _seconds(stamp[1]) if stamp else 0.0


def _seconds(stamp: str) -> float:
    try:
        return (datetime.strptime(stamp, _TIME_FORM) - datetime(1970, 1, 1)).total_seconds()
    except ValueError:
        return 0.0


def _launcher(closing: Sequence[tuple[int, str, str]]) -> Exit | None:
    """Return an exit by the signal that cancelled the whole job from outside, or None if there was none."""
    names = [name for pid, name, sender in closing if not pid and is_from_outside(sender)]
    status = -signal.Signals[names[0]] if names else 0
    return Exit(pid=0, rank=None, status=status, at_s=0.0, during_teardown=False) if names else None


def _memory(text: str) -> HostMemory | None:
    messages = killed_for_memory(text)
    if not messages:
        return None
    return HostMemory(
        total_bytes=None,
        available_bytes=None,
        limit_bytes=None,
        used_bytes=None,
        oom_kills=len(messages),
        kill_messages=messages,
    )


def _backend(text: str) -> str:
    if "ProcessGroupNCCL" in text or "WorkNCCL" in text:
        return "nccl"
    return "gloo" if "gloo/" in text else "any"


_SCRIPT = re.compile(r"^={20,}\n(\S{1,200}) FAILED\n-{20,}$", re.M)


def _script(text: str) -> str:
    match = _SCRIPT.search(text)
    return match[1] if match else ""


# Missing data, and how to record it next time.

_HOW = {
    "logs": ("torchrun --log-dir logs --redirects 3 --tee 3 ...", "srun --label --output=logs/%j_%t.out ..."),
    "stacks": (
        "nsa-harness attach",
        "py-spy dump --full-filenames --pid PID > rank3.txt",
        "import faulthandler; faulthandler.dump_traceback_later(600, repeat=True)",
    ),
    "flight recorder dumps": (
        "export TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/shared/nccl_trace_rank_",
        "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/nccl_trace_rank_",
    ),
}


@dataclass(frozen=True, kw_only=True)
class MissingData:
    """A kind of data that some ranks lack, and how to record it in the next run."""

    name: str
    how: tuple[str, ...]  # commands and settings that record such data next time


def _missing(evidence: Evidence, ranks: Mapping[int, _Rank], files: Sequence[JobFile]) -> Iterator[MissingData]:
    all_ranks = range(evidence.world_size)
    with_stacks = {rank.rank for snapshot in evidence.snapshots for rank in snapshot.ranks if rank.stacks}
    checks: dict[str, Callable[[int], bool]] = {
        "logs": lambda rank: rank in ranks and bool(ranks[rank].texts),
        "stacks": lambda rank: rank in with_stacks,
        "flight recorder dumps": lambda rank: rank in ranks and ranks[rank].recorder is not None,
    }
    cores = [file.name for file in files if file.kind is JobFileKind.CORE]
    for kind, has_data in checks.items():
        lacking = [rank for rank in all_ranks if not has_data(rank)]
        ranks_text = "every rank" if len(lacking) == len(all_ranks) > 1 else _ranks_text(lacking)
        now = tuple(f"pystack core {core} > rank3.txt  # and read that too" for core in cores[:1])
        if lacking:
            yield MissingData(name=f"{kind} of {ranks_text}", how=(*(now if kind == "stacks" else ()), *_HOW[kind]))


def _unused_files(files: Sequence[JobFile]) -> Iterator[Trouble]:
    """Yield a note for each file of the job that was not used, with the reason."""
    return (
        Trouble(what=file.name, why=file.reason)
        for file in files
        if file.kind is JobFileKind.NOTHING and file.reason != EMPTY
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {first}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
