"""The files through which the agents of a job on several nodes know of each other, in a directory that they share.

Every file is written by one agent, as a whole, by renaming a temporary file. On a network file system a reader may see
an old version, or none, for a while, so a file that is missing or not complete is read again later. Only the creation
of a file that must not exist yet decides between agents: which job a directory belongs to, which name a node has, and
which agent is the coordinator.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nsa_harness.core.evidence.evidence import Sample, Snapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.node_states import NodeState, Requests
from nsa_harness.errors import UsageError
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.rundir import NODES, AttemptDir, RunDir

_MAX_BYTES = 1 << 20
_MAX_LOOK_BYTES = 256 << 20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """The job to which a shared directory belongs, from one start of the job to the next."""

    job: str  # what identifies it: "Slurm job 17", or the command
    number: int = 1  # number of the first attempt since this start
    is_finished: bool = False


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one node shows in answer to one request for a snapshot."""

    look: int
    snapshot: Snapshot | None  # None: no rank lives on the node
    samples: tuple[Sample, ...]  # the new ones
    last_progress_s: float
    limits: Limits
    exited_ranks: tuple[int, ...]
    backend: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the coordinator has decided about the job."""

    number: int
    kind: str  # "hang", "lost" (a node is lost) or "missing" (a node never came)
    looks: tuple[int, ...] = ()  # the numbers of the snapshots that prove a hang
    hang_kind: str | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Coordination:
    """The file of the coordinator: its lease, the requested snapshots and the latest decision."""

    term: int = 0  # increases with each new coordinator
    holder: str = ""  # node of the coordinator; empty: it has resigned
    beat: int = 0
    requests: Requests = field(default_factory=Requests)
    decision: Decision | None = None
    verdict: str = ""  # of the whole job, once the report is complete


@dataclass(kw_only=True)
class SharedDirectory:
    """The files of one attempt of a job on several nodes, as one of its agents uses them."""

    attempt: AttemptDir  # of the whole job
    node: str
    _states: dict[str, NodeState] = field(default_factory=dict)
    _coordination: Coordination = field(default_factory=Coordination)
    _read_again_s: float = 0.0

    def __post_init__(self) -> None:
        self.own = self.attempt.node(self.node)  # only this node's agent writes it

    def write_state(self, state: NodeState) -> None:
        """Publish the state of this node. Raise OSError if that fails."""
        self.attempt.directory.write(self.own.path / "state.json", json_text(state) + "\n")

    def states(self) -> Mapping[str, NodeState]:
        """Return the latest known state of each node. The files are read at most twice per second."""
        if time.monotonic() < self._read_again_s:
            return dict(self._states)
        self._read_again_s = time.monotonic() + 0.5
        for name in self.attempt.nodes():
            state = self._read(self.attempt.node(name).path / "state.json", NodeState)
            if state is not None:
                self._states[name] = state
        return dict(self._states)

    def write_look(self, look: Look) -> None:
        """Answer a request for a snapshot. Raise OSError if that fails."""
        text = json_text(self.own.redaction.value(look)) + "\n"
        self.attempt.directory.write(self._look_path(self.node, look.look), text)

    def look(self, node: str, number: int) -> Look | None:
        """Return a node's answer to a request, or None if it cannot be read yet."""
        return self._read(self._look_path(node, number), Look, _MAX_LOOK_BYTES)

    def remove_looks(self, before: int) -> None:
        """Remove this node's answers to requests before the request number `before`."""
        for path in self.attempt.directory.list_files(self.own.path, "look*.json"):
            digits = path.stem.removeprefix("look")
            if digits.isdecimal() and int(digits) < before:
                with suppress(OSError):
                    self.attempt.directory.remove(path)

    def _look_path(self, node: str, number: int) -> Path:
        return self.attempt.node(node).path / f"look{number}.json"

    def coordination(self) -> Coordination:
        """Return the latest known file of the coordinator. An older one never replaces a newer one."""
        read = self._read(self.attempt.path / "coordinator.json", Coordination)
        if read is not None and (read.term, read.beat) > (self._coordination.term, self._coordination.beat):
            self._coordination = read
        return self._coordination

    def write_coordination(self, coordination: Coordination) -> None:
        """Publish the coordinator's file. Raise OSError if that fails."""
        self._coordination = coordination
        self.attempt.directory.write(self.attempt.path / "coordinator.json", json_text(coordination) + "\n")

    def claims_term(self, term: int) -> bool:
        """Return whether this agent is the first to claim the coordination of the job for `term`."""
        return self.attempt.directory.create(self.attempt.path / f".term{term}", self.node)

    def is_superseded(self, term: int) -> bool:
        """Return whether another agent has claimed a later term."""
        return self.attempt.directory.exists(self.attempt.path / f".term{term + 1}")

    def _read(self, path: Path, kind: type[T], most_bytes: int = _MAX_BYTES) -> T | None:
        try:
            return type_adapter(kind).validate_json(self.attempt.directory.read_whole_file(path, most_bytes))
        except (OSError, ValueError, RecursionError):
            return None


# Joining a job.


def join_job(run: RunDir, job: str, restart: int) -> int:
    """Join the job `job` in a shared directory, or make the directory that job's. Return the attempt's number.

    `restart`: how often the job was requeued. Raise UsageError if the directory belongs to another job, or to a job
    that has finished.
    """
    files = _job_files(run)
    for number, file in files.items():
        if file.job != job:
            raise UsageError(
                f"--shared {run.path}: it belongs to another job ({file.job}), and this is {job}; choose a directory"
                " for each job, such as one with the job's number in its name"
            )
        if number == restart and file.is_finished:
            raise UsageError(f"--shared {run.path}: this job has finished in it; choose a new directory")
    if not files and run.is_stored_run:
        raise UsageError(f"--shared {run.path}: it contains another run; choose a new directory")
    if restart not in files:
        attempts = [attempt.path.name for attempt in run.attempts()]
        last = max((int(name.partition("~")[2] or 1) for name in attempts), default=0)
        run.directory.create(_job_path(run, restart), json_text(JobFile(job=job, number=last + 1)) + "\n")
        files = _job_files(run)
        return join_job(run, job, restart) if restart in files else last + 1
    return files[restart].number


def finish_job(run: RunDir, job: str, restart: int, number: int) -> None:
    """Record that the job has finished, so that no agent joins it any more."""
    file = JobFile(job=job, number=number, is_finished=True)
    run.directory.write(_job_path(run, restart), json_text(file) + "\n")


def _job_path(run: RunDir, restart: int) -> Path:
    return run.path / f"job{restart}.json"


def _job_files(run: RunDir) -> dict[int, JobFile]:
    files = {}
    for path in run.directory.list_files(run.path, "job*.json"):
        digits = path.stem.removeprefix("job")
        with suppress(OSError, ValueError):
            files[int(digits)] = type_adapter(JobFile).validate_json(run.directory.read_whole_file(path, _MAX_BYTES))
    return files


def claim_node(attempt: AttemptDir, name: str) -> str:
    """Claim a name for this node, which is `name`, or `name-2` if another agent has it. Raise OSError on failure."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".-")[:60] or "node"
    (attempt.path / NODES).mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1
    while True:
        claimed = clean if number == 1 else f"{clean}-{number}"
        with suppress(FileExistsError):
            (attempt.path / NODES / claimed).mkdir(mode=0o700)
            return claimed
        number += 1


_PER_NODE = ("--node-rank", "--local-addr", "--rdzv-conf", "--log-dir", "--nproc-per-node", "--local-ranks-filter")


def job_identity(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what identifies a job on all of its nodes: the number of the Slurm job, or else the command."""
    if number := environment.get("SLURM_JOB_ID"):
        return f"Slurm job {number}"
    words: list[str] = []
    skips_value = False
    for word in command:
        name, has_value, _ = word.replace("_", "-").partition("=")
        if skips_value or name in _PER_NODE:
            skips_value = not skips_value and not has_value
            continue
        words.append(word)
    return f"the command {' '.join(words)}"


def node_count(command: Sequence[str]) -> int:
    """Return the smallest number of nodes in torchrun's option --nnodes, or 0 if the command has none."""
    text = " ".join(command)
    match = re.search(r"--nnodes[= ](\d+)", text)
    return int(match[1]) if match else 0


def node_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the nodes of a Slurm step, or () if they are unknown or their list is not a simple one."""
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    names: list[str] = []
    for prefix, inside, suffix in re.findall(r"([^\[\],]+)(?:\[([\d,-]+)\])?([^\[\],]*),?", text):
        for part in inside.split(",") if inside else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [None]
            names += [
                f"{prefix}{'' if number is None else str(number).zfill(len(first))}{suffix}" for number in numbers
            ]
    return tuple(names)
