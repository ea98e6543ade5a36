"""Read the answer of NCCL's RAS service, which counts the collectives that each rank of a communicator has launched.

The service exists since NCCL 2.24. It counts each kind of collective separately since 2.26, and it can answer in JSON
since 2.28.7: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from nsa_harness.core.evidence.evidence import Collective, RankSnapshot
from nsa_harness.core.evidence.host import LaunchCount, NcclCommunicator

_MAX_COMMUNICATORS = 512
# No rank can complete one of these collectives before every rank has launched it. The root of a broadcast, for example,
# may be done without the others.
_NEEDS_EVERY_RANK = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
_COLLECTIVES = (*_NEEDS_EVERY_RANK, "Broadcast", "Reduce")  # operations that every rank of a communicator calls


@dataclass(kw_only=True)
class _Communicator:
    """The part of an answer about one communicator. Ranks are numbered as in the communicator."""

    name: str
    size: int
    is_running: bool = True  # every rank has initialized it, and none has begun to destroy it
    counts: dict[str, dict[int, int]] = field(default_factory=dict)  # operation -> rank -> number of launches
    hosts: dict[str, dict[int, int]] = field(default_factory=dict)  # host -> rank -> process id
    missing: set[int] = field(default_factory=set)  # ranks that did not answer, as far as they are named


def parse_ras(answer: str, ranks: Mapping[int, int]) -> tuple[NcclCommunicator, ...]:
    """Return the communicators in an answer, as text or JSON, that have a process of this run.

    `ranks` maps the process id of each rank on this node to the rank. Raise ValueError if the answer is incomplete or
    has another form.
    """
    document = re.search(r"^\{", answer, re.MULTILINE)
    communicators = _from_json(answer[document.start() :]) if document else _from_text(answer)
    return tuple(
        NcclCommunicator(
            name=communicator.name,
            size=communicator.size,
            job_ranks=job_ranks,
            missing=tuple(sorted(communicator.missing)),
            launched=tuple(_differing_counts(communicator)) if communicator.is_running else (),
        )
        for communicator in list(communicators)[:_MAX_COMMUNICATORS]
        if (job_ranks := _job_ranks(communicator, ranks))
    )


def _job_ranks(communicator: _Communicator, ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the rank of the job for each rank of the communicator on this node, or {} if they are unknown.

    Process ids on other nodes may equal those on this node. So this node is the only host with none but known ids.
    """
    local = [members for members in communicator.hosts.values() if all(pid in ranks for pid in members.values())]
    if len(local) != 1:
        return {}
    known = {rank: ranks[pid] for rank, pid in local[0].items()}
    has_every_rank = len(communicator.hosts) == 1 and communicator.size == len(ranks)
    # The ranks of a communicator have the order of the job's ranks, so one that has all of them numbers them alike.
    if has_every_rank and all(rank == job_rank for rank, job_rank in known.items()):
        return {rank: rank for rank in range(communicator.size)}
    return known


def _differing_counts(communicator: _Communicator) -> Iterator[LaunchCount]:
    for operation in _COLLECTIVES:
        by_count: dict[int, list[int]] = {}
        for rank, count in sorted(communicator.counts.get(operation, {}).items()):
            by_count.setdefault(count, []).append(rank)
        if len(by_count) > 1:
            for count, members in sorted(by_count.items()):
                yield LaunchCount(operation=operation, count=count, ranks=tuple(members))


@dataclass(frozen=True, kw_only=True)
class _RankStatus:
    init_state: int
    finalize_called: bool
    destroy_flag: bool
    abort_flag: bool


@dataclass(frozen=True, kw_only=True)
class _Rank:
    rank: int
    host: str
    pid: int
    collective_counts: dict[str, int]
    status: _RankStatus


@dataclass(frozen=True, kw_only=True)
class _MissingRank:
    rank: int


@dataclass(frozen=True, kw_only=True)
class _JsonCommunicator:
    hash: str
    size: int
    ranks: list[_Rank]
    missing_ranks: list[_MissingRank]


@dataclass(frozen=True, kw_only=True)
class _Document:
    communicators: list[_JsonCommunicator]


_DOCUMENT = TypeAdapter(_Document)


def _from_json(text: str) -> Iterator[_Communicator]:
    for entry in _DOCUMENT.validate_json(text).communicators:
        communicator = _Communicator(name=entry.hash.removeprefix("0x")[:40], size=entry.size)
        communicator.missing = {rank.rank for rank in entry.missing_ranks}
        for rank in entry.ranks:
            status = rank.status
            has_ended = status.finalize_called or status.destroy_flag or status.abort_flag
            communicator.is_running &= status.init_state == 0 and not has_ended
            communicator.hosts.setdefault(rank.host, {})[rank.rank] = rank.pid
            for operation, count in rank.collective_counts.items():
                communicator.counts.setdefault(operation, {})[rank.rank] = count
        yield communicator


# A row of the summary: group, communicators, nodes, ranks per node, ranks per communicator, ranks, status, errors.
_SUMMARY = re.compile(r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d{1,6})\s+\d+\s+(\w+)\s+\w+\s*")
_HEADING = re.compile(r"#(\d+)-\d+ \((\w+)\) \w+")
_OPERATION = re.compile(r"\s*Communicator ranks have different (\w+)")
_LAUNCHED = re.compile(r"(?:launched up to operation (\d{1,18})|not launched any)").pattern
_SEVERAL_RANKS = re.compile(r"\s*(\d{1,6}) ranks have " + _LAUNCHED)
_ONE_RANK = re.compile(
    r"\s*Rank (\d{1,6}) (?:(has) " + _LAUNCHED + r" )?-- (?:GPU .* managed by process (\d{1,10}) on node (\S{1,80}))?"
)
_MISSING_RANKS = re.compile(r"\s*The missing ranks?: ([\d, ]{1,2000})")


def _from_text(text: str) -> Iterator[_Communicator]:
    """Yield the communicators about which the answer says more than a row of the summary."""
    if not re.search(r"^Warnings\n=+\n.*\n\Z", text, re.MULTILINE | re.DOTALL):
        raise ValueError(f"incomplete: {text.strip()[:200]!r}")
    summary: dict[str, re.Match[str]] = {}
    sections: dict[str, tuple[_Communicator, list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if row := _SUMMARY.fullmatch(line):
            summary[row[1]] = row
        elif heading := _HEADING.match(line):
            row = summary.get(heading[1])
            if row is None:
                raise ValueError(f"no summary: {line[:100]!r}")
            communicator = _Communicator(name=heading[2][:40], size=int(row[2]), is_running=row[3] == "RUNNING")
            _, lines = sections.setdefault(heading[2], (communicator, []))
        else:
            lines.append(line)
    for communicator, section in sections.values():
        _read_section(communicator, section)
        yield communicator


def _read_section(communicator: _Communicator, lines: Iterable[str]) -> None:
    """Add what the lines about a communicator say. Ranks that are not named have the one count without names."""
    operation, count = "", 0
    announced: dict[str, dict[int, int]] = {}  # operation -> count -> number of ranks, if there are several
    for line in lines:
        if match := _OPERATION.match(line):
            operation = match[1]
            communicator.is_running &= operation != "status"
        elif match := _SEVERAL_RANKS.match(line):
            count = int(match[2] or 0)
            communicator.counts.setdefault(operation, {})
            announced.setdefault(operation, {})[count] = int(match[1])
        elif match := _ONE_RANK.match(line):
            rank = int(match[1])
            if operation:
                communicator.counts.setdefault(operation, {})[rank] = int(match[3] or 0) if match[2] else count
            else:
                communicator.missing.add(rank)
            if match[4]:
                communicator.hosts.setdefault(match[5], {})[rank] = int(match[4])
        elif match := _MISSING_RANKS.match(line):
            communicator.missing.update(int(rank) for rank in match[1].replace(",", " ").split())
    everyone = set(range(communicator.size)) - communicator.missing
    for operation, named in communicator.counts.items():
        numbers = announced.get(operation, {})
        unnamed = [count for count in numbers if count not in named.values()]
        named.update(dict.fromkeys(everyone - named.keys(), unnamed[0]) if len(unnamed) == 1 else {})
        found = Counter(named.values())
        if named.keys() != everyone or any(found[count] != number for count, number in numbers.items()):
            named.clear()  # several counts have no names, or the answer is torn


def with_launch_counts(
    ranks: Sequence[RankSnapshot], before: Sequence[NcclCommunicator], after: Sequence[NcclCommunicator], now_ns: int
) -> tuple[RankSnapshot, ...]:
    """Return the ranks with the collectives that NCCL's counts show, if no rank has a recorder or a status file.

    NCCL reads the counts of different ranks at slightly different times. A difference counts only if it is the same in
    two answers: `before` and `after`. If the state of some rank stays unknown, the ranks are returned unchanged.
    """
    found: dict[int, list[Collective]] = {}
    for communicator in after:
        if communicator in before:
            for rank, collective in _collectives(communicator, now_ns):
                found.setdefault(rank, []).append(collective)
    living = [rank for rank in ranks if rank.process is not None]
    if any(rank.collectives or rank.status_file or rank.rank not in found for rank in living):
        return tuple(ranks)
    return tuple(replace(rank, collectives=tuple(found.get(rank.rank, ()))) for rank in ranks)


def _collectives(communicator: NcclCommunicator, now_ns: int) -> Iterator[tuple[int, Collective]]:
    """Yield the ranks of the job, each with the first collective that cannot complete, or its last one."""
    operations = {launch.operation for launch in communicator.launched}
    if not operations <= _NEEDS_EVERY_RANK.keys() or len(operations) > 1 or communicator.missing:
        return  # it is unknown which operation came first
    fewest = min((launch.count for launch in communicator.launched), default=0)
    ahead = {rank for launch in communicator.launched if launch.count > fewest for rank in launch.ranks}
    op = next((_NEEDS_EVERY_RANK[operation] for operation in operations), "collective")
    for rank, job_rank in communicator.job_ranks.items():
        yield (
            job_rank,
            Collective(
                group=communicator.name,
                seq=fewest + (rank in ahead),
                op=op,
                sizes=(),
                dtypes=(),
                retired=rank not in ahead,
                created_ns=now_ns,
                started=True,
            ),
        )
