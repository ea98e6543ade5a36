"""Health samples of a rank: numbers between its steps, and messages printed at its end."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.report import Place
from nsa_harness.core.stored_keys import stored_as


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory of the process at the end of a step."""

    step: int
    anonymous_bytes: int  # resident, without files and shared segments
    gpu_bytes: int | None  # allocated by torch; None = CUDA was not in use


@stored_as(elapsed_s="passed_s")
@dataclass(frozen=True, kw_only=True)
class DataWait:
    """The time that the program's main thread had waited for data loaders by the end of a step."""

    step: int
    waited_s: float
    elapsed_s: float
    place: Place | None = None  # line of the longest wait so far


@dataclass(frozen=True, kw_only=True)
class ParameterBlock:
    """Some neighbouring parameters of a replica."""

    checksum: str
    size: float  # root of the sum of squares, over a sample; nan if a value is not finite
    total: float


@dataclass(frozen=True, kw_only=True)
class ReplicaSample:
    """A replica's parameters at one moment."""

    # "made": after DDP made the replicas equal, or before the first step; "begun": before a forward; "stepped": after
    # the optimizer; "over": at the end of the program.
    at: str
    round: int  # backward passes followed by a step so far: the same number on every rank
    steps: int  # optimizer steps so far, of all optimizers
    checksum: str


@stored_as(samples="looks", blocks="parts", in_ddp="wrapped", was_broadcast="broadcast", reduces_gradients="reduced")
@dataclass(frozen=True, kw_only=True)
class Replica:
    """One DistributedDataParallel of a rank, or a model outside of it."""

    number: int
    ranks: tuple[int, ...]  # ranks whose parameters should be equal
    names: tuple[tuple[str, str], ...]  # first and last parameter of each part
    samples: tuple[ReplicaSample, ...]  # in order of time
    blocks: tuple[ParameterBlock, ...]  # the parts in the last sample
    hook: str = ""  # a communication hook that may leave replicas unequal on purpose
    in_ddp: bool = True  # in DDP, which keeps them equal
    was_broadcast: bool = False  # every parameter, before the first step
    reduces_gradients: bool = False  # every gradient of the first step, over all ranks, by the program itself


@dataclass(frozen=True, kw_only=True)
class OverwrittenFile:
    """A file that the rank overwrote and that still exists at exit."""

    path: str
    place: Place | None
    step: int


@dataclass(frozen=True, kw_only=True)
class UnawaitedCall:
    """A line that called a collective asynchronously and never checked any of its handles."""

    op: str
    place: Place | None
    calls: int


@dataclass(frozen=True, kw_only=True)
class DroppedBatches:
    """Batches that were dropped: an exception at one line ended their training pass, and they were not retried."""

    type: str
    place: Place | None  # where it was raised
    batches: int
    step: int  # step of the first batch


@stored_as(
    sample_count="looks", zero_gradient_count="still", without_gradient="never", without_gradient_count="never_count"
)
@dataclass(frozen=True, kw_only=True)
class GradientArrivals:
    """Gradients of one model after each backward pass, before they were reduced or used."""

    model: str
    sample_count: int  # samples that found any
    zero_gradient_count: int = 0  # parameters whose gradients were zero in every sample
    without_gradient: tuple[
        str, ...
    ] = ()  # no gradient in any sample, though their module was called; no torch optimizer stepped
    without_gradient_count: int = 0
    unset: tuple[str, ...] = ()  # values that no program begins with, when their first gradient came
    unset_value: str = ""


@dataclass(frozen=True, kw_only=True)
class NonFiniteValue:
    """The first time that a value was not finite."""

    step: int
    value: str  # "nan" or "inf"
    names: tuple[str, ...] = ()  # of parameters
    place: Place | None = None  # line that called backward on the loss


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """A line whose allocations were larger after a later step than after an earlier one."""

    place: Place
    first_step: int
    last_step: int
    size_bytes: int


@stored_as(
    sample_count="looks",
    data_waits="fetched",
    non_finite_loss="loss",
    non_finite_parameters="parameters",
    without_gradient="never",
    without_gradient_count="never_count",
    without_gradient_place="never_place",
    zero_gradient_count="still_count",
    zero_gradient_samples="still_looks",
    overwritten_files="wrote",
    unawaited_calls="unwaited",
    dropped_batches="given_up",
    gradient_arrivals="arrived",
    memory_growth="grown",
)
@dataclass(frozen=True, kw_only=True)
class HealthSamples:
    """All health samples of one rank."""

    steps: int = 0  # the last one that was sampled
    sample_count: int = 0  # samples of parameters
    memory: tuple[MemorySample, ...] = ()
    data_waits: tuple[DataWait, ...] = ()
    non_finite_loss: NonFiniteValue | None = None
    bad_losses: int = 0
    bad_in_a_row: int = 0  # up to the last one
    losses: int = 0
    non_finite_parameters: NonFiniteValue | None = None  # only stored while they are still broken in the last sample
    without_gradient: tuple[str, ...] = ()  # no gradient in any sample, though their module was called
    without_gradient_count: int = 0
    without_gradient_place: Place | None = None  # the line that uses the first of them
    zero_gradient_count: int = 0  # parameters of an optimizer whose gradients were zero in every sample
    zero_gradient_samples: int = 0  # the number of these samples
    replicas: tuple[Replica, ...] = ()
    overwritten_files: tuple[OverwrittenFile, ...] = ()
    unawaited_calls: tuple[UnawaitedCall, ...] = ()
    dropped_batches: tuple[DroppedBatches, ...] = ()
    gradient_arrivals: tuple[GradientArrivals, ...] = ()
    memory_growth: tuple[MemoryGrowth, ...] = ()  # largest growth first; only if the launch requested it
    open_group: bool | None = None  # a process group was still open at the end; None = no orderly end


@dataclass(frozen=True, kw_only=True)
class PrintedMessage:
    """A failure after or next to the program, as the interpreter or torch printed it."""

    kind: str  # "atexit", "left", "process group"; "thread", "child process"
    name: str  # name of the thread or process that died, or of the object that was left open
    error: str  # "RuntimeError: disk full"; "" if there is none
    place: Place | None  # the user's line
    entered: Place | None = None  # in the function that the thread or child began in
