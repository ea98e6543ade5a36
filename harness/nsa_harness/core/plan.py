"""The complete settings of one launch, from which a stored run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

MAX_RANKS = 65_536


class Launcher(StrEnum):
    TORCHRUN = "torchrun"  # torchrun --standalone --nproc-per-node N PROGRAM
    PLAIN = "plain"  # the command itself: one process, or the user's own launcher
    FORK = "fork"  # like torchrun, but forked from a process that has imported torch


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The time limits of a run in seconds. None: chosen while the run is watched, or no deadline."""

    stall_s: float | None = None
    busy_s: float | None = None
    open_wait_s: float | None = None
    start_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class FaultWhen:
    """Additional conditions under which a planted fault occurs. All conditions that are set must be met."""

    recomputed: tuple[int, ...] = ()  # each of these layers was recomputed in this backward pass
    any_recomputed: tuple[int, ...] = ()  # one of these layers was
    recomputed_layers: int | None = None  # at least this many layers were
    seq_len: int | None = None  # tokens: the sequence is at least this long
    layers: int | None = None  # the model has at least this many
    ranks: int | None = None  # the job has at least this many
    backend: str | None = None  # of the process group
    module: str | None = None  # the class of a module in the model or its wrapper
    find_unused_parameters: bool | None = None  # of the DDP that wraps the model
    static_graph: bool | None = None  # of the DDP that wraps the model
    chance: float | None = None  # 0 to 1: probability, drawn once in each process


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault deliberately planted in a program, which is kept secret from the code that judges the run."""

    kind: str
    rank: int | None  # None: every rank
    layer: int | None = None
    step: int = 1
    heals_s: float | None = None  # the healthy twin: the same path, which ends after this many seconds
    parameters: str | None = None  # pattern of the parameters that are set
    value: float = 0.0  # the new value of all their elements
    when: FaultWhen | None = None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bounds on a metric. The metric must satisfy every bound that is set."""

    lt: float | None = None
    le: float | None = None
    gt: float | None = None
    ge: float | None = None
    eq: float | None = None
    regex: str | None = None  # foreign programs: group 1 of the last match in output.log is the value


@dataclass(frozen=True, kw_only=True)
class LockedSchedule:
    """The comm.lock file that a run is compared with."""

    file: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Expect:
    verdict: str = "PASS"
    cause: str | None = None
    findings: tuple[str, ...] = ()  # all of them must be found
    missing_grads: int | None = None
    metrics: tuple[tuple[str, Bound], ...] = ()
    communication: LockedSchedule | None = None


@dataclass(frozen=True, kw_only=True)
class DiagnosticRerun:
    """The change with which a failed launch is repeated to find out more about the failure."""

    of: Annotated[int, Field(description="the attempt that it asks about")]
    change: Annotated[str, Field(description="the one thing that was changed")]
    says: Annotated[str, Field(description="the change for people, such as TORCH_DISTRIBUTED_DEBUG=INFO")]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The complete settings of one launch.

    `spec_hash` covers everything that determines what runs, but not on which machine or in which directory.
    """

    schema: int = 1
    scenario: str
    about: str
    ranks: int
    launcher: Launcher
    program: tuple[str, ...]  # after torchrun's options, or the whole command: file or module, then arguments
    env: tuple[tuple[str, str], ...]  # declared only, sorted
    cwd: str | None
    backend: str  # "gloo", "nccl", or "any" for a program whose choice is unknown
    device: str  # "cpu", "cuda" or "any"
    subject: str  # one line for people: "shape ci (4 layers, dim 128, T 256, fp32)", or the script
    limits: Limits
    expect: Expect
    fault: Fault | None
    notes: tuple[str, ...]  # choices made on the user's behalf
    not_covered: tuple[str, ...]  # what this form of the scenario cannot show
    spec_hash: str
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # dotted keys that the scenario sets, with values, sorted
    chosen: tuple[tuple[str, str], ...] = ()  # values of keys that were left to the shape or the machine, sorted
    deepening: DiagnosticRerun | None = None
    python: str | None = None  # the interpreter of a foreign program; None = the harness's own


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine that runs every launch of a command as a job, and what a job asks for."""

    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    site: str = "{}"  # the settings of the cluster as JSON, with those of the command line
    only: tuple[str, ...] = ()  # run on these nodes; (): on any
    options: tuple[str, ...] = ()  # of the command line that chose it; (): stored by an old nsa-harness

    @property
    def words(self) -> tuple[str, ...]:
        """The options of the command line that choose this engine again."""
        return self.options or ("--engine", self.name, "--nodes", str(self.nodes))


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A scenario that cannot be run on this machine, and the reason."""

    scenario: str
    about: str
    reason: str
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
