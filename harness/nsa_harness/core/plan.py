"""RunSpec: one launch, fully resolved. It repeats the run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

MAX_RANKS = 1024


class Launcher(StrEnum):
    TORCHRUN = "torchrun"  # torchrun --standalone --nproc-per-node N PROGRAM
    PLAIN = "plain"  # the command itself: one process, or a launcher of the user's own
    FORK = "fork"  # the same, forked from a process that has imported torch; only launching knows the difference


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds. None means: chosen while watching (`auto`), or no limit for the deadline."""

    stall_s: float | None = None
    busy_s: float | None = None
    open_wait_s: float | None = None
    start_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class FaultWhen:
    """On what the fault depends besides its rank and step. All that is given must hold."""

    recomputed: tuple[int, ...] = ()  # each of these layers was computed again in this backward pass
    any_recomputed: tuple[int, ...] = ()  # one of these was
    recomputed_layers: int | None = None  # at least so many were, whichever
    seq_len: int | None = None  # tokens: at least so long a sequence
    layers: int | None = None  # the model has at least so many
    ranks: int | None = None  # the job has at least so many
    backend: str | None = None  # of the process group
    module: str | None = None  # a class of which the model, or its wrapper, has a module
    find_unused_parameters: bool | None = None  # the model is wrapped in a DDP that was told this
    static_graph: bool | None = None  # the same
    chance: float | None = None  # 0 to 1: by lot, drawn once in each process


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault planted on purpose. Only the launch sees it; judge and diagnosis never do."""

    kind: str
    rank: int | None  # None: every rank
    layer: int | None = None
    step: int = 1
    heals_s: float | None = None  # the healthy twin: the same path, over after this many seconds
    parameters: str | None = None  # pattern of those that are set
    value: float = 0.0  # what all their elements become
    when: FaultWhen | None = None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a metric must satisfy; every bound given must hold."""

    lt: float | None = None
    le: float | None = None
    gt: float | None = None
    ge: float | None = None
    eq: float | None = None
    regex: str | None = None  # foreign programs: group 1 of the last match in output.log is the value


@dataclass(frozen=True, kw_only=True)
class Expect:
    verdict: str = "PASS"
    cause: str | None = None
    findings: tuple[str, ...] = ()  # each of them must be found
    missing_grads: int | None = None
    metrics: tuple[tuple[str, Bound], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DiagnosticRerun:
    """This launch is another one with one thing changed, made because that one left a question open."""

    of: Annotated[int, Field(description="the attempt that it asks about")]
    change: Annotated[str, Field(description="the one thing that was changed")]
    says: Annotated[str, Field(description="the change for people, such as TORCH_DISTRIBUTED_DEBUG=INFO")]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One launch. `spec_hash` covers everything that decides what runs, and nothing of where."""

    schema: int = 1
    scenario: str
    about: str
    ranks: int
    launcher: Launcher
    program: tuple[str, ...]  # what follows torchrun's options, or the whole command: file or module, then arguments
    env: tuple[tuple[str, str], ...]  # declared only, sorted
    cwd: str | None
    backend: str  # "gloo", "nccl", or "any" for a program whose choice is unknown
    device: str  # "cpu", "cuda" or "any"
    subject: str  # one line for people: "shape ci (4 layers, dim 128, T 256, fp32)", or the script
    limits: Limits
    expect: Expect
    fault: Fault | None
    notes: tuple[str, ...]  # choices made on the user's behalf, said aloud
    not_covered: tuple[str, ...]  # what this form of the scenario cannot show
    spec_hash: str
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # dotted keys that the scenario sets, with its values, sorted
    chosen: tuple[tuple[str, str], ...] = ()  # what became of keys that were left to the shape or the machine, sorted
    deepening: DiagnosticRerun | None = None
    python: str | None = None  # the interpreter of somebody else's program; None = the harness's own


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A scenario this machine cannot run."""

    scenario: str
    about: str
    reason: str
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
