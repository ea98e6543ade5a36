"""Read the files of a job that was not watched: logs by rank, NCCL's timeouts, Slurm's messages, and dumps."""

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

MAX_RANKS = 4096  # a higher number in a log is no rank
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"\[([A-Za-z_]{1,40}?)_?(\d{1,6})\]: ?")  # torchrun's --tee, and torch's own of a traceback
_LABEL = re.compile(r"^ *(\d{1,6}): ?")  # srun --label
_NCCL_PREFIX = re.compile(r"\[(?:PG [^\]]{1,120} )?Rank (\d{1,6})\]")
_GLOBAL = "rank"
_LABELLED = 0.8  # share of lines that make a log labelled: a line may be torn
_FEWEST_LABELLED = 3
_MAX_LINE = 4000


@dataclass(frozen=True, kw_only=True)
class JobLog:
    """One log file, split by rank."""

    lines: dict[int | None, tuple[str, ...]]  # None: lines without a rank, as a launcher writes them
    local: dict[int, int]  # local rank -> rank, from lines that have both


def by_rank(text: str) -> JobLog:
    """Return the lines of each rank without the rank's prefix. The ranks' lines may be interleaved."""
    plain = _COLOUR.sub("", text) if "\x1b" in text else text
    lines = [line[:_MAX_LINE].rstrip("\r") for line in plain.split("\n")]
    local: dict[int, int] = {}
    lines_of: dict[int | None, list[str]] = {}
    for task, task_lines in _tasks(lines):
        parsed = list(map(_split_prefix, task_lines))
        local |= {own: rank for own, rank, _ in parsed if own is not None and rank is not None}
        of_torchrun = any(own is not None or rank is not None for own, rank, _ in parsed)
        for own, rank, line in parsed:
            numbered = rank if rank is not None else local.get(own, own) if own is not None else None
            owner = numbered if numbered is not None or of_torchrun else task
            lines_of.setdefault(owner, []).append(line)
    return JobLog(lines={rank: tuple(rank_lines) for rank, rank_lines in lines_of.items()}, local=local)


def _tasks(lines: Sequence[str]) -> Iterator[tuple[int | None, list[str]]]:
    """Yield (task, its lines) if `srun --label` wrote the log, else (None, all lines)."""
    labels = [_LABEL.match(line) for line in lines]
    written = [label for label, line in zip(labels, lines, strict=True) if line.strip()]
    labelled = [label for label in written if label and int(label[1]) < MAX_RANKS]
    if len(labelled) < max(_FEWEST_LABELLED, _LABELLED * len(written)):
        yield None, list(lines)
        return
    tasks: dict[int | None, list[str]] = {}
    for label, line in zip(labels, lines, strict=True):
        task = int(label[1]) if label and int(label[1]) < MAX_RANKS else None
        tasks.setdefault(task, []).append(line[label.end() :] if label else line)
    yield from tasks.items()


def _split_prefix(line: str) -> tuple[int | None, int | None, str]:
    """Return (local rank, rank, text). "[default1]:[rank3]: text" comes from rank 3, which has local rank 1."""
    own = rank = None
    at = 0
    while prefix := _PREFIX.match(line, at):
        number = int(prefix[2])
        if number >= MAX_RANKS:
            break
        if prefix[1] == _GLOBAL:
            rank = number
        elif own is None and rank is None:
            own = number
        else:
            break
        at = prefix.end()
    if (
        rank is None
        and "Rank " in line
        and (nccl_prefix := _NCCL_PREFIX.search(line))
        and int(nccl_prefix[1]) < MAX_RANKS
    ):
        rank = int(nccl_prefix[1])
    return own, rank, line[at:]


_OWN_RANK = (
    re.compile(r"^\s*(?:declare -x |export )?RANK[=:] ?[\"']?(\d{1,6})\b"),
    re.compile(r"[\"']RANK[\"']: ?[\"']?(\d{1,6})\b"),
)
_WORLD_SIZE = re.compile(r"\bWORLD_SIZE[\"']?[=:] ?[\"']?(\d{1,6})\b|\bworld[_ ]size[=:] ?(\d{1,6})\b")
_LAUNCHER_TEXT = re.compile(
    r"torch/distributed/(?:run\.py|elastic/(?:agent|multiprocessing/api))|ChildFailedError|^(?:srun|slurmstepd): ", re.M
)


def find_rank(text: str) -> int | None:
    """Return the rank that the text prints as its own RANK, if it prints only one."""
    named = {int(match[1]) for words in _OWN_RANK for match in _matching_lines(words, text, "RANK")}
    return named.pop() if len(named) == 1 and max(named) < MAX_RANKS else None


def find_world_size(text: str) -> int:
    """Return the world size that the text prints most often; 0 if it prints none."""
    sizes = Counter(int(match[1] or match[2]) for match in _matching_lines(_WORLD_SIZE, text, "WORLD_SIZE", "world"))
    valid = [(count, size) for size, count in sizes.items() if 0 < size <= MAX_RANKS]
    return max(valid, default=(0, 0))[1]


def is_launcher_text(text: str) -> bool:
    """Whether torchrun or Slurm wrote a part of the text."""
    return _LAUNCHER_TEXT.search(text) is not None


_LOCAL_PATH = re.compile(r"(?:^|/)attempt_(\d{1,6})/(\d{1,6})/[^/]+$")
_RANK_PATH = re.compile(r"(?:^|[/_.\-])rank[_\-.]?(\d{1,6})(?=[/_.\-]|$)", re.I)
_LAST_NUMBER = re.compile(r"(?:^|[/_.\-])(?:r|gpu|task)?(\d{1,9})(?:\.[A-Za-z]{1,8}){0,2}$")


@dataclass(frozen=True, kw_only=True)
class PathRank:
    """The rank in the path of a file. All fields are None or empty if the path has none."""

    rank: int | None = None
    local: int | None = None  # torchrun's --log-dir: the local rank
    launch: str = ""  # torchrun's directory of that launch
    attempt: int = 0  # attempt of that launch
    number: int | None = None  # at the end of the name: a rank, or the number of a process


def rank_of_path(name: str) -> PathRank:
    """Return the rank, local rank or last number in the path: "rank3.log", "attempt_0/3/stderr.log", "job_3.out"."""
    if local := _LOCAL_PATH.search(name):
        return PathRank(local=_rank(local[2]), launch=name[: local.start()], attempt=int(local[1]))
    named = _RANK_PATH.findall(name)
    last = _LAST_NUMBER.search(name)
    return PathRank(rank=_rank(named[-1]) if named else None, number=int(last[1]) if last else None)


def _rank(digits: str) -> int | None:
    return int(digits) if int(digits) < MAX_RANKS else None


# NCCL's watchdog, in the wording of torch 1.13 to 2.13; older versions have no sizes and no group.
_TIMEOUT = re.compile(
    r"\[(?:PG [^\]]{1,120} )?Rank (?P<rank>\d{1,6})\].{0,200}?Watchdog caught collective operation timeout:"
    r" WorkNCCL\(SeqNum=(?P<seq>\d{1,18}), OpType=(?P<op>\w{1,60})(?:, NumelIn=(?P<count>\d{1,18}))?"
)
_PROGRESS = re.compile(
    r"\[PG (?:ID )?(?P<id>\d{1,9})(?: PG GUID (?P<group>[^\s(\]]{1,60})(?:\([^)\]]{0,60}\))?)? Rank (?P<rank>\d{1,6})\]"
    r".{0,200}?(?:at work(?: sequence id)?: (?P<seq>\d{1,18}).{0,60}?)?"
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d{1,18}), last completed(?: NCCL)? work: (?P<completed>-?\d{1,18})"
)
# The recorder's names of operations that the watchdog names as C++ does.
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
    """How far a rank was in a group when a watchdog reported."""

    rank: int
    group: str
    enqueued: int
    completed: int


def timeouts(text: str) -> tuple[tuple[int, Collective], ...]:
    """Return (rank, collective) for each timeout of NCCL's watchdog: the lowest number per rank and group."""
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
    """Return the watchdogs' last report on each rank and group."""
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
        created_ns=seq,  # the log only has the end time; the numbers give the order
        started=True,
    )


def _matching_lines(words: re.Pattern[str], text: str, *hints: str) -> Iterator[re.Match[str]]:
    """Yield the pattern's matches, only in lines with one of the hints: a plain search is cheap."""
    if not any(hint in text for hint in hints):
        return iter(())
    lines = (line[:_MAX_LINE] for line in text.split("\n") if any(hint in line for hint in hints))
    return islice((match for line in lines for match in words.finditer(line)), _MAX_MATCHES)


_TASKS = re.compile(r"srun: error: (?:\S{1,200}: )?tasks? (?P<tasks>[\d,\-]{1,400}): (?P<how>[^\n]{1,80})")
_CODE = re.compile(r"Exited with exit code (\d{1,3})")
_STATUS_BY_TEXT = (
    ("Out Of Memory", -9),
    ("Killed", -9),
    ("Segmentation fault", -11),
    ("Aborted", -6),
    ("Terminated", -15),
)
_OUT_OF_MEMORY = re.compile(r"[^\n]{0,80}(?:oom[_-]kill event|Out Of Memory)[^\n]{0,120}")


def exits_of_tasks(text: str) -> tuple[tuple[int, int], ...]:
    """Return (task, exit status) from srun's messages. A task is a rank if srun started the ranks."""
    return tuple(
        (task, status)
        for match in _matching_lines(_TASKS, text, "srun: error")
        if (status := _status(match["how"])) is not None
        for task in _numbers(match["tasks"])
    )


def _status(how: str) -> int | None:
    if code := _CODE.match(how):
        return int(code[1])
    return next((status for words, status in _STATUS_BY_TEXT if how.startswith(words)), None)


def _numbers(listed: str) -> Iterator[int]:
    """Return the numbers of "0-2,5": 0, 1, 2, 5."""
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(min(int(first), MAX_RANKS), min(int(last or first) + 1, MAX_RANKS))


def killed_for_memory(text: str) -> tuple[str, ...]:
    """Return the messages of Slurm and the kernel about memory, each once."""
    return tuple(
        dict.fromkeys(match[0].strip() for match in _matching_lines(_OUT_OF_MEMORY, text, "oom", "Out Of Memory"))
    )


_MAX_WATCHDOG_LINES = 4
_WATCHDOG_LINE = re.compile(r"Watchdog caught collective operation timeout[^\n]{0,200}")


def watchdog_lines(text: str) -> tuple[str, ...]:
    """Return the first timeout messages of NCCL's watchdog."""
    return tuple(
        match[0] for match in islice(_matching_lines(_WATCHDOG_LINE, text, "Watchdog caught"), _MAX_WATCHDOG_LINES)
    )


# TORCH_DISTRIBUTED_DEBUG=DETAIL: the two sides that it found different, in the wording of torch 2.11 to 2.13.
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d{1,6}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<seq>\d{1,18}), ?)?"
    r"OpType=(?P<op>\w{1,60})(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?(?:, TensorDtypes=(?P<dtype>\w{1,40}))?"
)


def mismatched_collectives(text: str) -> tuple[tuple[int, Collective], ...]:
    """Return (rank, collective) for both sides of the mismatches that TORCH_DISTRIBUTED_DEBUG=DETAIL reports."""
    collectives: dict[int, Collective] = {}
    for match in _matching_lines(_FINGERPRINT, text, "CollectiveFingerPrint"):
        rank = int(match["rank"])
        # A rank that got further names a sequence of its own; the report's own sequence is compared.
        if rank < MAX_RANKS:
            shape = tuple(int(size) for size in re.findall(r"\d{1,18}", match["shape"] or ""))
            opened = _open_collective("0", int(match["seq"] or 0), match["op"], None)
            collectives[rank] = replace(
                opened, sizes=(shape,) if shape else (), dtypes=(match["dtype"],) if match["dtype"] else ()
            )
    return tuple(collectives.items())


_PICKLE, _ELF, _CORE = b"\x80", b"\x7fELF", 4
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04", b"BZh")
EMPTY = "it is empty"
_SNIFFED = 4096
_BINARY = 0.1  # share of the first bytes


class JobFileKind(StrEnum):
    LOG = "log"
    RECORDER = "flight recorder dump"
    STACKS = "stack dump"
    CORE = "core file"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One file and its kind."""

    name: str
    kind: JobFileKind
    changed_ns: int = 0
    reason: str = ""  # for NOTHING: the reason why the file is not used
    text: str = ""  # text of a log or of a printed dump
    stacks: Mapping[int, tuple[Stack, ...]] = field(default_factory=dict)  # by process; 0 if the dump names none
    recorder: FlightDump | None = None


def is_document(head: bytes) -> bool:
    """Whether the file must be read completely: half a pickle or half a JSON document is useless."""
    return head[:1] == _PICKLE or _json_like(head)


def _json_like(head: bytes) -> bool:
    """Whether the file may be JSON. A log that begins with "[rank0]: " or "[W1123 02:07:28 ..." is not."""
    return re.match(rb'\s*(?:\[[\s{"\[\]]|\{[\s"}])', head) is not None


def read_job_file(name: str, data: bytes, changed_ns: int = 0) -> JobFile:
    """Return a file's kind and content. Never raises: an unusable file has a reason."""
    file = JobFile(name=name, kind=JobFileKind.NOTHING, changed_ns=changed_ns)
    if not data.strip():
        return replace(file, reason=EMPTY)
    if data[:1] == _PICKLE:
        return _recorder(file, data)
    if data[:4] == _ELF:
        if int.from_bytes(data[16:18], "little") != _CORE:
            return replace(file, reason="a program, and no dump of one")
        return replace(file, kind=JobFileKind.CORE)
    if data.startswith(_PACKED):
        return replace(file, reason="it is packed; unpack it first")
    head = data[:_SNIFFED]
    strange = sum(byte < 9 or 13 < byte < 27 for byte in head) + head.decode("utf-8", "replace").count("\ufffd")
    if strange > _BINARY * len(head) or b"\0\0" in head:
        return replace(file, reason="binary, and no dump that is known")
    if _json_like(head) and (document := _document(file, data)):
        return document
    return _text(file, data.decode("utf-8-sig", errors="replace"))


def _recorder(file: JobFile, data: bytes) -> JobFile:
    try:
        return replace(file, kind=JobFileKind.RECORDER, recorder=parse_dump(data))
    except ValueError as error:
        return replace(file, reason=str(error))


def _document(file: JobFile, data: bytes) -> JobFile | None:
    """Return a file that is one JSON document; None for a log with lines of JSON."""
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
    """Return a stack dump if the text is one, else a log. A log may also contain stacks of faulthandler."""
    stacks = parse_py_spy_text(text)
    if not stacks and _BEGINS_WITH_A_THREAD.match(text):
        stacks = {0: parse_faulthandler(text)}
    elif not stacks and "Traceback for thread" in text:
        try:
            stacks = {0: parse_pystack(text)}
        except ValueError:
            stacks = {}
    return replace(file, kind=JobFileKind.STACKS if stacks else JobFileKind.LOG, text=text, stacks=stacks)
