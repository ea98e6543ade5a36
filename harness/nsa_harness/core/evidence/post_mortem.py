"""Post-mortem: the evidence of a job that was not watched, from all of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from nsa_harness.core.evidence.evidence import (
    Collective,
    Ending,
    Evidence,
    Exit,
    Frame,
    Raised,
    RankEvidence,
    RankSnapshot,
    Snapshot,
    Stack,
)
from nsa_harness.core.evidence.exit_messages import (
    agent_failures,
    closing_signals,
    deaths,
    debugged,
    error_lines,
    handed_on,
    last_traceback,
    last_words,
    timeout_message,
    warnings_of,
)
from nsa_harness.core.evidence.flight import FlightDump, essential
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.evidence.host import HostMemory, SentSignal
from nsa_harness.core.evidence.job_files import (
    EMPTY,
    MAX_RANKS,
    JobFile,
    JobLog,
    Kind,
    by_rank,
    exits_of_tasks,
    fingerprints,
    is_of_launcher,
    killed_for_memory,
    progress,
    rank_of_path,
    rank_said,
    timeouts,
    watchdog_lines,
    world_size_said,
)
from nsa_harness.core.evidence.stacks import parse_faulthandler
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Trouble

_OF_SOME_RANK = "it does not say of which rank it is: it is taken for one of the ranks, and called rank {} here"
_TRACEBACK = "Traceback (most recent call last):\n"
_NAMED_PARTS = 8  # parts of a path that a short name may have
_DIED = re.compile(r"^Fatal Python error: ", re.M)
_LAUNCHER = "ChildFailedError"  # torchrun's own exception after a rank has failed


@dataclass(kw_only=True)
class _Rank:
    """Everything that all files together say of one rank."""

    texts: list[tuple[str, str]] = field(default_factory=list)  # (file, text)
    stacks: tuple[Stack, ...] = ()
    children: dict[int, tuple[Stack, ...]] = field(default_factory=dict)
    stacks_of: str = ""  # the file that the stacks come from
    recorder: FlightDump | None = None
    recorder_of: str = ""
    collectives: tuple[Collective, ...] = ()  # from watchdogs
    fingerprint: Collective | None = None
    pid: int = 0
    exit: Exit | None = None

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The evidence, the source of each part, and the data that would have shown more."""

    evidence: Evidence
    files: Mapping[str, str]  # a proof as the rules name it -> the file that was read
    missing: tuple[Missing, ...]
    script: str  # from torchrun's messages; empty if unknown


def read_post_mortem(files: Sequence[JobFile], node: str) -> PostMortem:
    """Return the evidence of a job from its files. Never raises."""
    return _Merge(files=sorted(files, key=lambda one: (one.changed_ns, one.name)), node=node).made()


@dataclass(kw_only=True)
class _Merge:
    files: Sequence[JobFile]
    node: str
    ranks: dict[int, _Rank] = field(default_factory=dict)
    launcher: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)

    def made(self) -> PostMortem:
        latest = _latest_attempts(self.files)
        logs = [step for step in latest if step.kind is Kind.LOG]
        self.numbered = _numbered_ranks(one.name for one in logs)
        split = [(one, by_rank(one.text)) for one in logs]
        local = {rank: known for _, log in split for rank, known in log.local.items()}
        for one, log in split:
            self._take_log(one, log, local)
        everything = "\n".join(text for _, text in self.launcher)
        self.failures = agent_failures(everything)
        self._take_exits(everything)
        self._take_watchdogs([text for _, text in self._all_texts()])
        pids = {failure.pid: failure.rank for failure in self.failures}
        for one in latest:
            self._take_dump(one, pids)
        self._take_orphans()
        return self._post_mortem(everything)

    def _of(self, rank: int) -> _Rank:
        return self.ranks.setdefault(rank, _Rank())

    # Logs.

    def _take_log(self, one: JobFile, log: JobLog, local: Mapping[int, int]) -> None:
        whose = self._owner(one, log, local)
        for rank, lines in log.lines.items():
            text = "\n".join(lines)
            if not text.strip():
                continue
            owner = rank if rank is not None else whose
            # Lines that srun labels may come from torchrun itself, one per node.
            if owner is None or (rank is not None and is_of_launcher(text)):
                self.launcher.append((one.name, text))
            else:
                self._of(owner).texts.append((one.name, text))

    def _owner(self, one: JobFile, log: JobLog, local: Mapping[int, int]) -> int | None:
        """Return the rank of lines that name none: by the path, the content, or the only rank that other lines name."""
        named = [rank for rank in log.lines if rank is not None]
        path, bare = rank_of_path(one.name), "\n".join(log.lines.get(None, ()))
        if path.local is not None:
            return named[0] if len(named) == 1 else local.get(path.local, path.local)
        if is_of_launcher(bare) or len(named) > 1:
            return None
        if path.rank is not None:
            return path.rank
        said = rank_said(bare)
        known = said if said is not None else next(iter(named), None)
        return known if known is not None else self.numbered.get(one.name)

    def _all_texts(self) -> Iterator[tuple[str, str]]:
        yield from self.launcher
        for rank in self.ranks.values():
            yield from rank.texts

    # What launchers say.

    def _take_exits(self, text: str) -> None:
        began = _first_time(text)
        for failure in self.failures:
            # torchrun has microseconds for the first failure; its table only has seconds.
            at_s = max(0.0, _time_of(text, failure.pid) - began) + (0.0 if failure.first else 0.5)
            self._of(failure.rank).exit = Exit(
                pid=failure.pid, rank=failure.rank, status=failure.status, at_s=at_s, by_us=False
            )
            self._of(failure.rank).pid = failure.pid
        for rank, status in () if self.failures else exits_of_tasks(text):
            self._of(rank).exit = Exit(pid=0, rank=rank, status=status, at_s=0.0, by_us=False)

    def _take_watchdogs(self, texts: Iterable[str]) -> None:
        whole = "\n".join(texts)
        gave_up = timeouts(whole)
        for rank, one in gave_up:
            self._of(rank).collectives += (one,)
        for rank, one in fingerprints(whole):
            self._of(rank).fingerprint = one
        entered = {(one.group, one.seq): one for _, one in gave_up}
        for said in progress(whole):
            mine = self._of(said.rank).collectives
            if any(one.group == said.group for one in mine):
                continue
            # The rank has entered the call that the others wait in, or completed as many calls.
            ahead = [one for (group, seq), one in entered.items() if group == said.group and seq <= said.enqueued]
            open_ = tuple(one for one in ahead if one.seq > said.completed)
            self._of(said.rank).collectives += open_ or (_done(said.group, said.completed),)

    # Dumps.

    def _take_dump(self, one: JobFile, pids: Mapping[int, int]) -> None:
        if one.kind not in (Kind.RECORDER, Kind.STACKS):
            return
        path = rank_of_path(one.name)
        by_pid = next((pids[pid] for pid in one.stacks if pid in pids), None)
        number = path.number if path.number is not None and path.number < MAX_RANKS else None
        of_path = path.rank if path.rank is not None else path.local
        by_name = of_path if of_path is not None else pids.get(path.number or -1, number)
        rank = by_pid if by_pid is not None else by_name
        said = rank_said(one.text) if rank is None else None
        self._keep_dump(one, rank if rank is not None else said)

    def _keep_dump(self, one: JobFile, rank: int | None) -> None:
        if rank is None:
            rank = self._free_rank()
            self.trouble.append(Trouble(what=one.name, why=_OF_SOME_RANK.format(rank)))
        mine = self._of(rank)
        if one.recorder is not None:
            # JSON has no lines: of the same moment the pickle shows more.
            if mine.recorder is None or one.recorder.frames or not mine.recorder.frames:
                mine.recorder, mine.recorder_of = one.recorder, one.name
            return
        (pid, stacks), *children = one.stacks.items()
        mine.stacks, mine.stacks_of, mine.children = stacks, one.name, dict(children)
        mine.pid = pid or mine.pid

    def _take_orphans(self) -> None:
        """Assign tracebacks and dumps of threads in logs that name no rank."""
        for name, text in list(self.launcher):
            if is_of_launcher(text):
                self._take_unlabelled(name, text)
            elif last_traceback(text) or parse_faulthandler(text):
                self.launcher.remove((name, text))
                self._keep_text(name, text, self._free_rank())

    def _take_unlabelled(self, name: str, text: str) -> None:
        """Assign a traceback among torchrun's own lines to the rank that failed first, if it left no other."""
        first = next((failure.rank for failure in self.failures if failure.first), None)
        parts = (f"{_TRACEBACK}{part}" for part in text.split(_TRACEBACK)[1:])
        printed = (part for part in parts if (raised := last_traceback(part)) and not raised[0].endswith(_LAUNCHER))
        own = next(printed, None)
        if own is not None and first is not None and not last_traceback(self._of(first).text):
            self._keep_text(name, own, first)

    def _keep_text(self, name: str, text: str, rank: int) -> None:
        self.trouble.append(Trouble(what=name, why=_OF_SOME_RANK.format(rank)))
        self._of(rank).texts.append((name, text))

    def _free_rank(self) -> int:
        return next(number for number in range(MAX_RANKS + 1) if number not in self.ranks)

    # All of it.

    def _post_mortem(self, said: str) -> PostMortem:
        everything = "\n".join((said, *(rank.text for rank in self.ranks.values())))
        names = _full_names(self.ranks.values())
        for one in self.ranks.values():
            one.stacks = tuple(_with_full_names(stack, names) for stack in one.stacks)
        groups = {
            name: some for rank in self.ranks.values() if rank.recorder for name, some in rank.recorder.groups.items()
        }
        told = max([world_size_said(everything), *(rank + 1 for some in groups.values() for rank in some)], default=0)
        size = max([told if told <= MAX_RANKS else 0, *(rank + 1 for rank in self.ranks), 1])
        ranks = tuple(_rank_evidence(rank, self.ranks.get(rank, _Rank())) for rank in range(size))
        exits = tuple(sorted((rank.exit for rank in ranks if rank.exit), key=lambda one: one.at_s))
        looked = tuple(
            look for rank in ranks if (look := _snapshot(rank, self.ranks.get(rank.rank, _Rank()))) is not None
        )
        closing = closing_signals(said)
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
            snapshots=(Snapshot(number=1, at_s=0.0, ranks=looked),) if looked else (),
            samples=(),
            last_progress_s=None,
            leftovers=(),
            undead=None,
            metrics={},
            trouble=(),
            signals=tuple(
                SentSignal(pid=pid, rank=self._rank_of(pid), signal=signal, sender=sender, at_s=None)
                for pid, signal, sender in closing
            ),
            memory=_memory(everything),
            observed=True,
            last_lines=error_lines(said),
            groups=groups,
        )
        return PostMortem(
            evidence=replace(evidence, trouble=(*self.trouble, *_unused_files(self.files))),
            files=self._proofs(),
            missing=tuple(_missing(evidence, self.ranks, self.files)),
            script=_script(said),
        )

    def _rank_of(self, pid: int) -> int | None:
        return next((failure.rank for failure in self.failures if failure.pid == pid), None)

    def _proofs(self) -> dict[str, str]:
        """Return proofs as rules name the files of a run, with the file that was read here."""
        found: dict[str, str] = {}
        for rank, one in self.ranks.items():
            raised = [name for name, text in one.texts if last_traceback(text)] or [name for name, _ in one.texts]
            found |= {f"rank{rank}/stderr.log": raised[-1]} if raised else {}
            found |= {f"rank{rank}/stacks.txt": one.stacks_of or raised[-1]} if one.stacks_of or raised else {}
            found |= {f"rank{rank}/flight.json": one.recorder_of} if one.recorder_of else {}
        for name, _ in self.launcher:
            found |= dict.fromkeys(("output.log", "processes.jsonl"), name)
        return found


def _numbered_ranks(names: Iterable[str]) -> dict[str, int]:
    """Return the ranks of logs that only a number at the end of their names distinguishes: "job_0.out", "job_1.out"."""
    alike: dict[str, dict[str, int]] = {}
    for name in names:
        number = rank_of_path(name).number
        if number is not None and number < MAX_RANKS:
            alike.setdefault(re.sub(r"\d+(?=\D*$)", "#", name), {})[name] = number
    return {name: number for some in alike.values() if len(some) > 1 for name, number in some.items()}


def _latest_attempts(files: Sequence[JobFile]) -> list[JobFile]:
    """Return the files without logs of attempts that torchrun retried."""
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


def _rank_evidence(rank: int, known: _Rank) -> RankEvidence:
    errors = known.text
    raised = _raised(rank, known)
    fatal = _DIED.search(errors)
    lines = (*error_lines(errors), *watchdog_lines(errors)) if errors else ()
    return RankEvidence(
        rank=rank,
        pid=known.pid or None,
        exit=known.exit,
        raised=handed_on(raised) if raised else None,
        board=None,
        collectives=_collectives(known),
        death_stacks=parse_faulthandler(errors[fatal.start() :]) if fatal else (),
        peak_rss_bytes=None,
        peak_gpu_bytes=None,
        traces=RankTraces(arrived=None, missing=None, missing_parameters=(), buckets=()),
        last_loss=None,
        error_lines=tuple(dict.fromkeys(lines)),
        warned=warnings_of(errors.splitlines()),
        debugged=debugged(errors),
        last_words=last_words(errors),
        deaths=deaths(errors, raised),
    )


def _raised(rank: int, known: _Rank) -> Raised | None:
    """Return the exception of a rank: from the last of its files with a traceback of the rank itself."""
    for _, text in reversed(known.texts):
        printed = last_traceback(text)
        if printed and not printed[0].endswith(_LAUNCHER):
            kind, message, frames = printed
            return Raised(
                rank=rank, at_s=None, type=kind, message=message, frames=frames, proof=f"rank{rank}/stderr.log"
            )
    return None


def _collectives(known: _Rank) -> tuple[Collective, ...]:
    """Return the recorder's collectives, with the frames that entered them; else those of watchdogs."""
    if known.recorder is None:
        return known.collectives or ((known.fingerprint,) if known.fingerprint else ())
    frames = known.recorder.frames
    kept = essential(known.recorder.collectives)
    return tuple(replace(one, frames=frames.get((one.group, one.seq), ())) for one in kept)


def _snapshot(rank: RankEvidence, known: _Rank) -> RankSnapshot | None:
    """Return the rank's last state from a dump, or from its own traceback if it gave up waiting there."""
    stacks, proof = known.stacks, "stacks.txt"
    text = known.text
    if not stacks and not _DIED.search(text):
        stacks = parse_faulthandler(text)
    if not stacks and rank.raised and rank.raised.frames and timeout_message(rank):
        proof = "stderr.log"
        stacks = (_stack_of_traceback(rank.raised.frames),)
    recorded = known.recorder is not None or bool(known.collectives)
    if not stacks and not recorded:
        return None
    return RankSnapshot(
        rank=rank.rank,
        pid=known.pid,
        process=None,
        stacks=stacks,
        child_stacks=known.children,
        collectives=rank.collectives if recorded else (),
        proof=f"rank{rank.rank}/{proof}" if stacks else f"rank{rank.rank}/flight.json",
        dumped=True,
    )


def _stack_of_traceback(frames: tuple[Frame, ...]) -> Stack:
    return Stack(thread="MainThread", tid=None, active=False, frames=frames, source="traceback")


def _full_names(ranks: Iterable[_Rank]) -> dict[str, str]:
    """Return the stacks with full file names. py-spy shortens them; other files of the job have the full name."""
    full = {
        frame.file
        for rank in ranks
        for frames in (
            *((rank.recorder.frames.values()) if rank.recorder else ()),
            *(stack.frames for stack in rank.stacks),
            *(printed[2] for printed in map(last_traceback, [text for _, text in rank.texts]) if printed),
        )
        for frame in frames
        if frame.file.startswith("/")
    }
    found: dict[str, set[str]] = {}
    for file in full:
        parts = file.split("/")
        for count in range(1, min(len(parts), _NAMED_PARTS)):
            found.setdefault("/".join(parts[-count:]), set()).add(file)
    return {short: files.pop() for short, files in found.items() if len(files) == 1}


def _with_full_names(stack: Stack, names: Mapping[str, str]) -> Stack:
    return replace(
        stack, frames=tuple(replace(frame, file=names.get(frame.file, frame.file)) for frame in stack.frames)
    )


def _done(group: str, seq: int) -> Collective:
    return Collective(
        group=group, seq=seq, op="collective", sizes=(), dtypes=(), retired=True, created_ns=max(seq, 0), started=True
    )


_TIME = r"time\s*:\s*(\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)"
_TIME_FORM = "%Y-%m-%d_%H:%M:%S"


def _first_time(text: str) -> float:
    return min((_seconds(one) for one in re.findall(_TIME, text)), default=0.0)


def _time_of(text: str, pid: int) -> float:
    """Return when torchrun reports that this process failed; 0 if it does not."""
    blocks = text.split("time")
    found = next((block for block in reversed(blocks) if f"(pid: {pid})" in block), "")
    said = re.match(_TIME, f"time{found}")
    return _seconds(said[1]) if said else 0.0


def _seconds(said: str) -> float:
    try:
        return (datetime.strptime(said, _TIME_FORM) - datetime(1970, 1, 1)).total_seconds()
    except ValueError:
        return 0.0


def _launcher(closing: Sequence[tuple[int, str, str]]) -> Exit | None:
    """Return the launcher's exit. If a scheduler ended the job, that is the launcher's end; 15 is SIGTERM."""
    whole = any(not pid and sender.startswith("Slurm") for pid, _, sender in closing)
    return Exit(pid=0, rank=None, status=-15, at_s=0.0, by_us=False) if whole else None


def _memory(text: str) -> HostMemory | None:
    killed = killed_for_memory(text)
    if not killed:
        return None
    return HostMemory(
        total_bytes=None, available_bytes=None, limit_bytes=None, used_bytes=None, oom_kills=len(killed), killed=killed
    )


def _backend(text: str) -> str:
    if "ProcessGroupNCCL" in text or "WorkNCCL" in text:
        return "nccl"
    return "gloo" if "gloo/" in text else "any"


_SCRIPT = re.compile(r"^={20,}\n(\S{1,200}) FAILED\n-{20,}$", re.M)


def _script(text: str) -> str:
    found = _SCRIPT.search(text)
    return found[1] if found else ""


# What is missing, and how to have it next time.

_HOW = {
    "logs": (
        "torchrun --log-dir logs --redirects 3 --tee 3 ...",
        "srun --label --output=logs/%j_%t.out ...",
    ),
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
class Missing:
    """Data that would have shown more. `how` has commands and settings that record it next time."""

    what: str
    how: tuple[str, ...]


def _missing(evidence: Evidence, ranks: Mapping[int, _Rank], files: Sequence[JobFile]) -> Iterator[Missing]:
    everyone = range(evidence.world_size)
    looked = {one.rank for look in evidence.snapshots for one in look.ranks if one.stacks}
    known: dict[str, Callable[[int], bool]] = {
        "logs": lambda rank: rank in ranks and bool(ranks[rank].texts),
        "stacks": lambda rank: rank in looked,
        "flight recorder dumps": lambda rank: rank in ranks and ranks[rank].recorder is not None,
    }
    cores = [file.name for file in files if file.kind is Kind.CORE]
    for what, there in known.items():
        lacking = [rank for rank in everyone if not there(rank)]
        whose = "every rank" if len(lacking) == len(everyone) > 1 else _ranks_text(lacking)
        now = tuple(f"pystack core {core} > rank3.txt  # and read that too" for core in cores[:1])
        if lacking:
            yield Missing(what=f"{what} of {whose}", how=(*(now if what == "stacks" else ()), *_HOW[what]))


def _unused_files(files: Sequence[JobFile]) -> Iterator[Trouble]:
    """Return the reasons for unused files, except empty logs: most ranks write nothing to stderr."""
    return (Trouble(what=file.name, why=file.why) for file in files if file.kind is Kind.NOTHING and file.why != EMPTY)


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
