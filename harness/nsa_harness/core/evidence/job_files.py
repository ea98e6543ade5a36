"""Read the files of a job that was not watched, such as logs and stack dumps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from nsa_harness.core.evidence.evidence import Collective, Stack
from nsa_harness.core.evidence.flight import FlightDump, parse_dump
from nsa_harness.core.evidence.stacks import parse_faulthandler, parse_py_spy, parse_py_spy_text, parse_pystack

MAX_RANKS = 4096  # a number in a log is not taken for a rank if it is this high
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"\[([A-Za-z_]{1,40}?)_?(\d{1,6})\]: ?")  # of torchrun --tee, and of torch in a traceback
_LABEL = re.compile(r"^ *(\d{1,6}): ?")  # srun --label
_NCCL_PREFIX = re.compile(r"\[(?:PG [^\]]{1,120} )?Rank (\d{1,6})\]")
_GLOBAL = "rank"
# A log counts as written by `srun --label` if at least this share of its lines, and this many, have a label. Some lines
# may lack one, because writers interrupt each other.
_LABEL_SHARE = 0.8
_MIN_LABELS = 3
_MAX_LINE = 4000


@dataclass(frozen=True, kw_only=True)
class JobLog:
    """The lines of one log file, grouped by the rank that printed them."""

    lines: dict[int | None, tuple[str, ...]]  # rank -> its lines; None -> lines without a rank, such as a launcher's
    local: dict[int, int]  # local rank -> rank, from lines that name both


def by_rank(text: str) -> JobLog:
    """Return the lines of a log by the rank that printed them, without the prefixes that name the ranks."""
    plain = _COLOUR.sub("", text) if "\x1b" in text else text
    lines = [line[:_MAX_LINE].rstrip("\r") for line in plain.split("\n")]
    local: dict[int, int] = {}
    lines_of: dict[int | None, list[str]] = {}
    for task, task_lines in _tasks(lines):
        parts = list(map(_split_prefix, task_lines))
        local |= {local_rank: rank for local_rank, rank, _ in parts if local_rank is not None and rank is not None}
        has_prefixes = any(local_rank is not None or rank is not None for local_rank, rank, _ in parts)
        for local_rank, rank, line in parts:
            if rank is None and local_rank is not None:
                rank = local.get(local_rank, local_rank)
            owner = rank if rank is not None or has_prefixes else task
            lines_of.setdefault(owner, []).append(line)
    return JobLog(lines={rank: tuple(rank_lines) for rank, rank_lines in lines_of.items()}, local=local)


def _tasks(lines: Sequence[str]) -> Iterator[tuple[int | None, list[str]]]:
    """Yield the number and lines of each task in a log of `srun --label`, or (None, all lines) for any other log."""
    labels = [_LABEL.match(line) for line in lines]
    of_text = [label for label, line in zip(labels, lines, strict=True) if line.strip()]
    valid = [label for label in of_text if label and int(label[1]) < MAX_RANKS]
    if len(valid) < max(_MIN_LABELS, _LABEL_SHARE * len(of_text)):
        yield None, list(lines)
        return
    tasks: dict[int | None, list[str]] = {}
    for label, line in zip(labels, lines, strict=True):
        task = int(label[1]) if label and int(label[1]) < MAX_RANKS else None
        tasks.setdefault(task, []).append(line[label.end() :] if label else line)
    yield from tasks.items()


def _split_prefix(line: str) -> tuple[int | None, int | None, str]:
    """Return the local rank and the rank in the prefix of a log line, and the text after the prefix."""
    local_rank = rank = None
    at = 0
    while prefix := _PREFIX.match(line, at):
        number = int(prefix[2])
        if number >= MAX_RANKS:
            break
        if prefix[1] == _GLOBAL:
            rank = number
        elif local_rank is None and rank is None:
            local_rank = number
        else:
            break
        at = prefix.end()
    if rank is None and "Rank " in line and (nccl_prefix := _NCCL_PREFIX.search(line)):
        rank = _rank(nccl_prefix[1])
    return local_rank, rank, line[at:]


_OWN_RANK = (
    re.compile(r"^\s*(?:declare -x |export )?RANK[=:] ?[\"']?(\d{1,6})\b"),
    re.compile(r"[\"']RANK[\"']: ?[\"']?(\d{1,6})\b"),
)
_WORLD_SIZE = re.compile(r"\bWORLD_SIZE[\"']?[=:] ?[\"']?(\d{1,6})\b|\bworld[_ ]size[=:] ?(\d{1,6})\b")
_LAUNCHER_TEXT = re.compile(
    r"torch/distributed/(?:run\.py|elastic/(?:agent|multiprocessing/api))|ChildFailedError|SignalException: Process"
    r"|^(?:srun|slurmstepd): ",
    re.M,
)


def find_rank(text: str) -> int | None:
    """Return the value of RANK printed in a log, or None if the log does not contain exactly one value."""
    ranks = {int(match[1]) for pattern in _OWN_RANK for match in _matching_lines(pattern, text, "RANK")}
    return ranks.pop() if len(ranks) == 1 and max(ranks) < MAX_RANKS else None


def find_world_size(text: str) -> int:
    """Return the world size that occurs most often in a log, or 0 if it contains none."""
    sizes = Counter(int(match[1] or match[2]) for match in _matching_lines(_WORLD_SIZE, text, "WORLD_SIZE", "world"))
    valid = [(count, size) for size, count in sizes.items() if 0 < size <= MAX_RANKS]
    return max(valid, default=(0, 0))[1]


def is_launcher_text(text: str) -> bool:
    """Return whether the text contains messages from torchrun or Slurm."""
    return _LAUNCHER_TEXT.search(text) is not None


_LOCAL_PATH = re.compile(r"(?:^|/)attempt_(\d{1,6})/(\d{1,6})/[^/]+$")
_RANK_PATH = re.compile(r"(?:^|[/_.\-])rank[_\-.]?(\d{1,6})(?=[/_.\-]|$)", re.I)
_LAST_NUMBER = re.compile(r"(?:^|[/_.\-])(?:r|gpu|task)?(\d{1,9})(?:\.[A-Za-z]{1,8}){0,2}$")


@dataclass(frozen=True, kw_only=True)
class PathRank:
    """The rank, launch and attempt that a file's path encodes; None, empty or 0 where it does not."""

    rank: int | None = None
    local: int | None = None  # local rank, in a path of torchrun --log-dir
    launch: str = ""  # torchrun's directory of the launch
    attempt: int = 0  # number of torchrun's attempt within the launch
    number: int | None = None  # number at the end of the name: a rank, or a process id


def rank_of_path(name: str) -> PathRank:
    """Return the ranks encoded in a path: 3 in "rank3.log", local 3 in "attempt_0/3/stderr.log", or a number."""
    if local := _LOCAL_PATH.search(name):
        return PathRank(local=_rank(local[2]), launch=name[: local.start()], attempt=int(local[1]))
    ranks = _RANK_PATH.findall(name)
    last = _LAST_NUMBER.search(name)
    return PathRank(rank=_rank(ranks[-1]) if ranks else None, number=int(last[1]) if last else None)


def _rank(digits: str) -> int | None:
    return int(digits) if int(digits) < MAX_RANKS else None


# The messages of NCCL's watchdog in torch 1.13 to 2.13. Older versions print no sizes and no group.
_TIMEOUT = re.compile(
    r"\[(?:PG [^\]]{1,120} )?Rank (?P<rank>\d{1,6})\].{0,200}?Watchdog caught collective operation timeout:"
    r" WorkNCCL\(SeqNum=(?P<seq>\d{1,18}), OpType=(?P<op>\w{1,60})(?:, NumelIn=(?P<count>\d{1,18}))?"
)
_PROGRESS = re.compile(
    r"\[PG (?:ID )?(?P<id>\d{1,9})(?: PG GUID (?P<group>[^\s(\]]{1,60})(?:\([^)\]]{0,60}\))?)? Rank (?P<rank>\d{1,6})\]"
    r".{0,200}?(?:at work(?: sequence id)?: (?P<seq>\d{1,18}).{0,60}?)?"
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d{1,18}), last completed(?: NCCL)? work: (?P<completed>-?\d{1,18})"
)
# The watchdog prints the C++ names of operations. These are the flight recorder's names.
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
_TRANSFERS = frozenset({"SEND", "RECV", "RECVANYSOURCE", "COALESCED"})
_MAX_MATCHES = 4096


@dataclass(frozen=True, kw_only=True)
class WatchdogReport:
    """The progress of one rank in one process group, taken from NCCL's timeout report."""

    rank: int
    group: str
    enqueued: int  # number of the last enqueued collective
    completed: int  # number of the last completed collective


def timeouts(text: str) -> tuple[tuple[int, Collective], ...]:
    """Return each rank and the first collective of each group that NCCL's watchdog reports as timed out."""
    groups = {
        (int(match["rank"]), int(match["seq"])): match["group"] or match["id"]
        for match in _matching_lines(_PROGRESS, text, "last enqueued")
        if match["seq"] is not None
    }
    first: dict[tuple[int, str], Collective] = {}
    for match in _matching_lines(_TIMEOUT, text, "Watchdog caught"):
        rank, seq = int(match["rank"]), int(match["seq"])
        if rank >= MAX_RANKS or match["op"] in _TRANSFERS:
            continue
        group = groups.get((rank, seq), "0")
        earlier = first.get((rank, group))
        if earlier is None or seq < earlier.seq:
            first[rank, group] = _open_collective(group, seq, match["op"], match["count"])
    return tuple((rank, collective) for (rank, _), collective in first.items())


def watchdog_reports(text: str) -> tuple[WatchdogReport, ...]:
    """Return, for each rank and process group, the latest progress that NCCL's watchdog reported."""
    latest = {
        (int(match["rank"]), match["group"] or match["id"]): (int(match["enqueued"]), int(match["completed"]))
        for match in _matching_lines(_PROGRESS, text, "last enqueued")
        if int(match["rank"]) < MAX_RANKS
    }
    return tuple(
        WatchdogReport(rank=rank, group=group, enqueued=enqueued, completed=completed)
        for (rank, group), (enqueued, completed) in latest.items()
    )


def _open_collective(group: str, seq: int, op: str, count: str | None) -> Collective:
    return Collective(
        group=group,
        seq=seq,
        op=_OPERATIONS.get(op, op.lower()),
        sizes=((int(count),),) if count else (),
        dtypes=(),
        retired=False,
        created_ns=seq,  # the log does not have this time; the number has the same order
        started=True,
    )


def _matching_lines(pattern: re.Pattern[str], text: str, *hints: str) -> Iterator[re.Match[str]]:
    """Yield the matches of `pattern` in lines with one of `hints`, which are much faster to search for."""
    if not any(hint in text for hint in hints):
        return iter(())
    lines = (line[:_MAX_LINE] for line in text.split("\n") if any(hint in line for hint in hints))
    return islice((match for line in lines for match in pattern.finditer(line)), _MAX_MATCHES)


_TASKS = re.compile(r"srun: error: (?:\S{1,200}: )?tasks? (?P<tasks>[\d,\-]{1,400}): (?P<how>[^\n]{1,80})")
_CODE = re.compile(r"Exited with exit code (\d{1,3})")
_STATUS_BY_TEXT = {"Out Of Memory": -9, "Killed": -9, "Segmentation fault": -11, "Aborted": -6, "Terminated": -15}
_OUT_OF_MEMORY = re.compile(r"[^\n]{0,80}(?:oom[_-]kill event|Out Of Memory)[^\n]{0,120}")


def exits_of_tasks(text: str) -> tuple[tuple[int, int], ...]:
    """Return the task number and the exit status of each task that srun reports as ended."""
    return tuple(
        (task, status)
        for match in _matching_lines(_TASKS, text, "srun: error")
        if (status := _status(match["how"])) is not None
        for task in _numbers(match["tasks"])
    )


def _status(ending: str) -> int | None:
    """Return the exit status in a message from srun, negative for a signal, or None if it contains none."""
    if code := _CODE.match(ending):
        return int(code[1])
    return next((status for text, status in _STATUS_BY_TEXT.items() if ending.startswith(text)), None)


def _numbers(ranges: str) -> Iterator[int]:
    """Yield each number in a list of ranges such as "0-2,5"."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(min(int(first), MAX_RANKS), min(int(last or first) + 1, MAX_RANKS))


def killed_for_memory(text: str) -> tuple[str, ...]:
    """Return the messages in a log about processes killed because the host ran out of memory."""
    return tuple(
        dict.fromkeys(match[0].strip() for match in _matching_lines(_OUT_OF_MEMORY, text, "oom", "Out Of Memory"))
    )


_MAX_WATCHDOG_LINES = 4
_WATCHDOG_LINE = re.compile(r"Watchdog caught collective operation timeout[^\n]{0,200}")


def watchdog_lines(text: str) -> tuple[str, ...]:
    """Return the first few messages in a log in which NCCL's watchdog reports a timeout."""
    return tuple(
        match[0] for match in islice(_matching_lines(_WATCHDOG_LINE, text, "Watchdog caught"), _MAX_WATCHDOG_LINES)
    )


# The two calls that TORCH_DISTRIBUTED_DEBUG=DETAIL reports as different, in the wording of torch 2.11 to 2.13.
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d{1,6}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<seq>\d{1,18}), ?)?"
    r"OpType=(?P<op>\w{1,60})(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?(?:, TensorDtypes=(?P<dtype>\w{1,40}))?"
)


def mismatched_collectives(text: str) -> tuple[tuple[int, Collective], ...]:
    """Return the rank and collective of each mismatch that TORCH_DISTRIBUTED_DEBUG=DETAIL reports."""
    collectives: dict[int, Collective] = {}
    for match in _matching_lines(_FINGERPRINT, text, "CollectiveFingerPrint"):
        rank = int(match["rank"])
        # A rank that got further names a sequence of its own; the report's own sequence is compared.
        if rank < MAX_RANKS:
            shape = tuple(int(size) for size in re.findall(r"\d{1,18}", match["shape"] or ""))
            collective = _open_collective("0", int(match["seq"] or 0), match["op"], None)
            collectives[rank] = replace(
                collective, sizes=(shape,) if shape else (), dtypes=(match["dtype"],) if match["dtype"] else ()
            )
    return tuple(collectives.items())


_PICKLE, _ELF, _CORE = b"\x80", b"\x7fELF", 4
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04", b"BZh")
EMPTY = "it is empty"
_HEAD_BYTES = 4096  # the part of a file from which its kind is guessed
_BINARY_SHARE = 0.1  # a file with more control characters in this part is binary


class JobFileKind(StrEnum):
    """The kind of one of a job's files, recognized by its content."""

    LOG = "log"
    RECORDER = "flight recorder dump"
    STACKS = "stack dump"
    CORE = "core file"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One of a job's files, with its kind and content."""

    name: str
    kind: JobFileKind
    changed_ns: int = 0  # time of the last change, in ns since 1970
    reason: str = ""  # for NOTHING: the reason why the file is not used
    text: str = ""  # text of a log or of a stack dump
    stacks: Mapping[int, tuple[Stack, ...]] = field(default_factory=dict)  # by process id; 0 if the dump names none
    recorder: FlightDump | None = None


def is_document(head: bytes) -> bool:
    """Return whether a file beginning with `head` is a pickle or JSON, of which a part is of no use."""
    return head[:1] == _PICKLE or _is_json_like(head)


def _is_json_like(head: bytes) -> bool:
    """Return whether a file beginning with `head` could be JSON. A log that begins with "[rank0]: " could not."""
    return re.match(rb'\s*(?:\[[\s{"\[\]]|\{[\s"}])', head) is not None


def read_job_file(name: str, data: bytes, changed_ns: int = 0) -> JobFile:
    """Return the kind and content of one of a job's files, or NOTHING with a `reason` if it cannot be used."""
    file = JobFile(name=name, kind=JobFileKind.NOTHING, changed_ns=changed_ns)
    if not data.strip():
        return replace(file, reason=EMPTY)
    if data[:1] == _PICKLE:
        return _recorder(file, data)
    if data[:4] == _ELF:
        if int.from_bytes(data[16:18], "little") != _CORE:
            return replace(file, reason="a program, and no dump of one")
        return replace(file, kind=JobFileKind.CORE)
    if data.startswith(_COMPRESSED):
        return replace(file, reason="it is packed; unpack it first")
    head = data[:_HEAD_BYTES]
    unprintable = sum(byte < 9 or 13 < byte < 27 for byte in head) + head.decode("utf-8", "replace").count("\ufffd")
    if unprintable > _BINARY_SHARE * len(head) or b"\0\0" in head:
        return replace(file, reason="binary, and no dump that is known")
    if _is_json_like(head) and (document := _document(file, data)):
        return document
    return _text(file, data.decode("utf-8-sig", errors="replace"))


def _recorder(file: JobFile, data: bytes) -> JobFile:
    try:
        return replace(file, kind=JobFileKind.RECORDER, recorder=parse_dump(data))
    except ValueError as error:
        return replace(file, reason=str(error))


def _document(file: JobFile, data: bytes) -> JobFile | None:
    """Return the file with the content of its JSON document, or None if `data` is not a JSON document."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and "entries" in value:
        return _recorder(file, data)
    try:
        stacks = parse_py_spy(data.decode("utf-8", errors="replace"), "py-spy")
        pids = {thread.get("pid") for thread in value}
        pid = pids.pop() if len(pids) == 1 else 0
    except (ValueError, TypeError, AttributeError):
        return replace(file, reason="JSON, and neither a flight recorder dump nor stacks of py-spy")
    if not stacks:
        return replace(file, reason="JSON without anything in it")
    return replace(file, kind=JobFileKind.STACKS, stacks={pid if isinstance(pid, int) else 0: stacks})


_BEGINS_WITH_A_THREAD = re.compile(r"\s*(?:Timeout \([\d:.]+\)!\s+)?(?:Current thread|Thread) 0x[0-9a-f]+ ")


def _text(file: JobFile, text: str) -> JobFile:
    """Return the file as a stack dump if it looks like one, otherwise as a log."""
    stacks = parse_py_spy_text(text)
    if not stacks and _BEGINS_WITH_A_THREAD.match(text):
        stacks = {0: parse_faulthandler(text)}
    elif not stacks and "Traceback for thread" in text:
        try:
            stacks = {0: parse_pystack(text)}
        except ValueError:
            stacks = {}
    return replace(file, kind=JobFileKind.STACKS if stacks else JobFileKind.LOG, text=text, stacks=stacks)
