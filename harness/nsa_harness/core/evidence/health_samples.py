"""Data classes for the samples of a training run's health, taken between training steps."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.report import Place
from nsa_harness.core.stored_keys import stored_as


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """The host and GPU memory of a rank at the end of an optimizer step."""

    step: int
    anonymous_bytes: int  # resident memory without mapped files and shared memory
    gpu_bytes: int | None  # allocated by torch; None = CUDA was not in use


@stored_as(elapsed_s="passed_s")
@dataclass(frozen=True, kw_only=True)
class DataWait:
    """The total time that a rank had waited for DataLoaders by the end of an optimizer step."""

    step: int
    waited_s: float  # total time that it waited for batches
    elapsed_s: float  # time since the probe began to measure these waits
    place: Place | None = None  # line of the longest wait so far


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The median times of a rank in the steps since the sample before, in seconds per step."""

    step: int  # the last of these steps
    count: int  # number of these steps; at most 64 are measured
    passed_s: float  # duration of the step
    # Time outside of waits for other ranks, at least and at most. Time in which the rank was ready to run but had no
    # CPU does not count.
    min_own_s: float
    max_own_s: float
    backward_s: float  # CPU time in backward passes
    fetching_s: float  # waiting for batches of a DataLoader


@dataclass(frozen=True, kw_only=True)
class ParameterBlock:
    """A checksum over a block of neighbouring parameters in a model replica."""

    checksum: str
    size: float  # root of the sum of squares of some of the values; nan if a value is not finite
    total: float  # sum of these values


@dataclass(frozen=True, kw_only=True)
class ReplicaSample:
    """A checksum over all parameters of a model replica at one moment."""

    # "made": after DDP made the replicas equal, or before the first step; "begun": before a forward; "stepped": after
    # the optimizer; "over": at the end of the program.
    at: str
    round: int  # number of backward passes so far that were followed by a step; the same number on every rank
    steps: int  # number of steps so far, of all optimizers
    checksum: str
    block_checksums: str = ""  # the last four characters of each block's checksum
    learning_rates: tuple[float, ...] = ()  # of the optimizers' groups that have these parameters
    optimizer_state: str = ""  # a checksum of the optimizers' state; "": there is none for some parameter
    # Line of a forward pass since the last sample that called the model inside of DDP, in a step that never called DDP.
    bypass_place: Place | None = None
    elements: int = 0  # "stepped", without DDP: number of elements in the collectives since the iteration before


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A checksum of a model replica at the first forward pass after the ranks exchanged data between two steps."""

    number: int  # exchanges are counted from 1
    calls: int  # number of collectives of the rank so far
    elements: int  # number of elements in the collectives since the last optimizer step
    checksum: str
    blocks: tuple[ParameterBlock, ...] = ()


@stored_as(
    samples="looks", blocks="parts", in_ddp="wrapped", was_broadcast="broadcast", reduces_gradients="reduced", type="of"
)
@dataclass(frozen=True, kw_only=True)
class Replica:
    """A rank's copy of a model, of its buffers or of a second instance, and the checksums taken of the copy."""

    number: int  # models are numbered per rank
    ranks: tuple[int, ...]  # ranks whose copies should be equal
    names: tuple[tuple[str, str], ...]  # names of the first and the last parameter of each block
    order: tuple[str, ...] = ()  # for each block, a checksum of its parameters' names in order; empty: not recorded
    name_set: str = ""  # a checksum of the names of all parameters that does not depend on their order
    samples: tuple[ReplicaSample, ...]  # in order of time
    blocks: tuple[ParameterBlock, ...]  # the blocks in the last sample
    hook: str = ""  # a communication hook of DDP, which may leave replicas unequal on purpose
    in_ddp: bool = True  # the model is wrapped in DDP, which keeps the replicas equal
    was_broadcast: bool = False  # the program broadcast every parameter before the first step
    reduces_gradients: bool = False  # the program itself reduced every gradient of the first step over all ranks
    # "buffers"; "copy": a module or dict with the names and shapes of a model; "added": parameters that the model
    # inside of DDP received after DDP wrapped it; "beside": other parameters that DDP does not average; "summed" and
    # "left out": parameters whose gradients a program without DDP sums over all ranks, and all others; "": parameters
    kind: str = ""
    type: str = ""  # type of the module, or "dict", if there is a kind
    wrap_place: Place | None = None  # for "added" and "beside": the line that wrapped the model in DDP
    numel: int = 0  # number of elements of a model without DDP
    first_checksum: str = ""  # of the first sample, "made", which `samples` may not contain any more
    exchanges: tuple[Exchange, ...] = ()  # of a model without DDP


@dataclass(frozen=True, kw_only=True)
class OverwrittenFile:
    """A file that a rank overwrote and that still existed when the rank exited."""

    path: str
    place: Place | None
    step: int


@dataclass(frozen=True, kw_only=True)
class UnawaitedCall:
    """A line that called a collective asynchronously without ever waiting for the result."""

    op: str
    place: Place | None
    calls: int  # number of calls from this line


@dataclass(frozen=True, kw_only=True)
class DroppedBatches:
    """The batches that a rank dropped because of exceptions raised by one line."""

    type: str  # type of the exception
    place: Place | None  # the line that raised it
    batches: int  # number of dropped batches
    step: int  # optimizer step of the first of them


@stored_as(
    sample_count="looks", zero_gradient_count="still", without_gradient="never", without_gradient_count="never_count"
)
@dataclass(frozen=True, kw_only=True)
class GradientArrivals:
    """The findings in samples of a model's gradients, taken after its backward passes."""

    model: str
    sample_count: int  # number of samples in which some parameter had a gradient
    zero_gradient_count: int = 0  # number of parameters whose gradients were zero in every sample
    # Names of parameters without a gradient in any sample, although their module was called. They are only recorded if
    # no optimizer of torch took a step.
    without_gradient: tuple[str, ...] = ()
    without_gradient_count: int = 0
    unset: tuple[str, ...] = ()  # names of parameters that were never initialized, according to their values
    unset_value: str = ""  # the value of these parameters when their first gradient arrived


@dataclass(frozen=True, kw_only=True)
class LineShare:
    """A line of the program, and in how many of the samples after the first step the main thread executed it."""

    place: Place
    count: int


@dataclass(frozen=True, kw_only=True)
class NonFiniteValue:
    """The first loss or parameters in a run that were NaN or infinite."""

    step: int
    value: str  # "nan" or "inf"
    names: tuple[str, ...] = ()  # names of the parameters; empty for a loss
    place: Place | None = None  # for a loss: the line that called backward on it


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """A line of the program whose allocated memory grew between two steps."""

    place: Place
    first_step: int
    last_step: int
    size_bytes: int  # the growth between the two steps


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
    """All health samples of one rank, which reveal faults that raise no error."""

    steps: int = 0  # the last optimizer step that was sampled
    sample_count: int = 0  # number of samples of parameters
    memory: tuple[MemorySample, ...] = ()
    data_waits: tuple[DataWait, ...] = ()
    step_times: tuple[StepTimes, ...] = ()  # empty: not measured
    non_finite_loss: NonFiniteValue | None = None
    bad_losses: int = 0  # number of losses that were not finite
    bad_in_a_row: int = 0  # number of losses at the end of the run that were all not finite
    losses: int = 0  # number of losses
    non_finite_parameters: NonFiniteValue | None = None  # None if all parameters are finite in the last sample
    without_gradient: tuple[str, ...] = ()  # parameters without any gradient, although their module was called
    without_gradient_count: int = 0
    without_gradient_place: Place | None = None  # the line that uses the first of these parameters
    # A collective without autograd that was given results of all these parameters: its line and its name.
    gradient_cut_place: Place | None = None
    gradient_cut_op: str = ""
    zero_gradient_count: int = 0  # number of one optimizer's parameters whose gradients were zero in every sample
    zero_gradient_samples: int = 0  # number of samples of this optimizer
    replicas: tuple[Replica, ...] = ()
    overwritten_files: tuple[OverwrittenFile, ...] = ()
    unawaited_calls: tuple[UnawaitedCall, ...] = ()
    dropped_batches: tuple[DroppedBatches, ...] = ()
    gradient_arrivals: tuple[GradientArrivals, ...] = ()
    memory_growth: tuple[MemoryGrowth, ...] = ()  # largest growth first; empty unless the launch requested it
    lines: tuple[LineShare, ...] = ()  # most frequent line first
    line_samples: int = 0  # number of samples, which also includes lines that are not listed
    open_group: bool | None = None  # a process group was open at exit; None = the interpreter did not exit normally


@stored_as(entry_place="entered")
@dataclass(frozen=True, kw_only=True)
class PrintedMessage:
    """A printed message about a problem at exit, or about a failed thread or child process."""

    kind: str  # "atexit", "left", "process group", "thread" or "child process"
    name: str  # name of the thread or process that failed, or of the object that was left open
    error: str  # "RuntimeError: disk full"; "" if the message names no exception
    place: Place | None  # the innermost line of the program in the traceback
    entry_place: Place | None = None  # the line in the function in which the thread or child process began
