"""The interface of an engine, which starts a job on one or more nodes, and the values that it exchanges."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from nsa_harness.engine.site import Site
from nsa_harness.errors import HarnessError

OUTPUT = "output.log"  # what the job's script prints, in the directory of the job


class EngineError(HarnessError):
    """Raised if an engine refuses or cannot start a job."""

    exit_code = 125


class Unreachable(EngineError):
    """Raised if an engine does not answer at the moment, so that nothing is known about the job."""


class JobState(StrEnum):
    """The state of a job, as its engine knows it. It says nothing about whether the program is healthy."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    LOST = "lost"  # the engine no longer knows the job

    @property
    def has_ended(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)

    @property
    def is_abnormal(self) -> bool:
        """Whether something other than the program itself ended the job."""
        return self.has_ended and self not in (JobState.COMPLETED, JobState.FAILED, JobState.LOST)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of a job at one moment."""

    state: JobState
    reason: str = ""  # why it is pending, or why it ended, in words
    exit_code: int | None = None
    nodes: str = ""  # the nodes that it uses, as the engine writes them, such as "n[1-2]"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The resources that an engine offers at the moment."""

    missing: str = ""  # why the engine cannot be used here, or ""
    nodes: int | None = None  # None: unknown
    gpus_per_node: int | None = None  # of the best equipped node; None: unknown


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to render: one agent per node, which starts the ranks of its node and watches them."""

    name: str  # unique, so that the job can be found even if its handle was lost
    directory: Path  # for the script and its output; every node must see it
    nodes: int
    ranks_per_node: int
    agent: tuple[str, ...]  # the command that watches what follows `--`
    torchrun: tuple[str, ...]  # the command of torchrun without options, or () if the program is started without it
    as_module: bool
    program: tuple[str, ...]  # the file or module, and its arguments
    env: Mapping[str, str]
    cwd: Path
    limit_s: float | None  # after this time on its nodes, the engine may end the job
    gpus_per_node: int = 0
    only: tuple[str, ...] = ()  # the nodes on which it must run; (): any
    site: Site = field(default_factory=Site)

    def node_command(self, rendezvous_id: str, endpoint: str, options: Sequence[str] = ()) -> str:
        """Return the shell command that a node executes.

        `rendezvous_id` and `endpoint` are where the nodes meet, and `options` are further options of torchrun. All of
        them may refer to variables of the shell.
        """
        if not self.torchrun:
            return shlex.join([*self.agent, "--", *self.program])
        meeting = [f'"--rdzv-id={rendezvous_id}"', "--rdzv-backend=c10d", f'"--rdzv-endpoint={endpoint}"', *options]
        torchrun = [
            shlex.join([*self.agent, "--", *self.torchrun]),
            f"--nnodes={self.nodes} --nproc-per-node={self.ranks_per_node}",
            " ".join(meeting),
            shlex.join([*(["-m"] if self.as_module else []), "--", *self.program]),
        ]
        return " \\\n  ".join(torchrun)

    def exports(self) -> list[str]:
        """Return the shell commands that set the variables of the job."""
        return [f"export {name}={shlex.quote(value)}" for name, value in {**self.site.env, **self.env}.items()]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that starts a job, and the command with which a person would submit it."""

    file: Path
    text: str
    command: tuple[str, ...]
    name: str  # of the job


@dataclass(frozen=True, kw_only=True)
class JobHandle:
    """The identity of a submitted job, with which any process can find it again."""

    schema: int = 1
    engine: str
    id: str
    directory: str  # of the job
    facts: Mapping[str, str] = field(default_factory=dict)  # what this engine alone needs


@dataclass(frozen=True, kw_only=True)
class NodeOutput:
    """The output of a command on one node, and its exit status."""

    node: str
    text: str
    status: int


class Engine(Protocol):
    """Starts jobs and finds them again. An engine keeps no state of its own."""

    name: str

    def capabilities(self) -> Capabilities:
        """Return what this engine offers at the moment."""

    def mistakes(self, nodes: int, gpus_per_node: int) -> Iterator[tuple[str, str]]:
        """Yield the key and what is wrong with it for each setting of the site that this engine cannot fulfil.

        `nodes` and `gpus_per_node` are what each job asks for.
        """

    def idle_nodes(self) -> Sequence[str]:
        """Return the names of the nodes that run no job at the moment. Raise EngineError if they are not known."""

    def render(self, job: Job) -> Script:
        """Return the script of a job. Nothing is written."""

    def submit(self, script: Script, env: Mapping[str, str]) -> JobHandle:
        """Start a job whose script is already stored. Raise EngineError if the engine refuses it."""

    def find(self, script: Script) -> JobHandle | None:
        """Return the handle of a job that was submitted, but whose handle was lost, or None if it is unknown."""

    def poll(self, handle: JobHandle) -> JobStatus:
        """Return the state of a job. Raise Unreachable if it is not known at the moment."""

    def exec_on_nodes(self, handle: JobHandle, command: Sequence[str]) -> Iterator[NodeOutput]:
        """Run a command once on each node of a running job, and yield what it printed."""

    def cancel_command(self, handle: JobHandle) -> str:
        """Return the command with which a person would cancel the job."""

    def cancel(self, handle: JobHandle) -> None:
        """End a job. Nothing happens if it has already ended."""
