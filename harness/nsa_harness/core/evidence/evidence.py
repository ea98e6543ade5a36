"""Data classes for observations of each rank during a run.

The verdict and the diagnosis are derived from this evidence alone. Times are seconds since the launch of the run (the
start of the reaper process), on the node's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from nsa_harness.core.evidence.coverage import Coverage
from nsa_harness.core.evidence.gradients import BucketOrder, OrderDifference, RankTraces
from nsa_harness.core.evidence.health_samples import HealthSamples, PrintedMessage
from nsa_harness.core.evidence.host import (
    Gpu,
    HostMemory,
    MemoryAtEvent,
    NcclCommunicator,
    NcclInfo,
    Process,
    SentSignal,
)
from nsa_harness.core.evidence.network import Network
from nsa_harness.core.evidence.rank_ranges import StoredRanks, stored_groups
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Place, Trouble
from nsa_harness.core.stored_keys import stored_as, stored_in_form


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The latest progress event of one thread, such as the start of a forward pass."""

    tid: int  # native id of the thread
    kind: str  # one of protocol.KINDS
    name: str  # the module, operation or stage
    step: int  # optimizer step in progress, 1-based
    at_s: float
    count: int  # number of such events of this thread so far
    position: int = 0  # number of the process's training events since the step began


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One Python frame in a call stack: source file, line and function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to a torch.distributed function that a rank made from Python."""

    number: int  # number of the call in its process, from 1
    op: str  # the function, such as all_reduce
    group: str  # name of the process group
    place: Place | None  # the line that made the call
    elements: int  # for init_process_group: the world size that was passed
    dtype: str
    step: int
    entered_s: float
    left_s: float | None  # when the call returned; None = still inside
    position: int = 0  # number of training events (data, forward, backward, optimizer) since the step began
    peer: int | None = None  # global rank of a point-to-point partner, or of the root of a broadcast, gather and so on
    key: str = ""  # for a wait on the store: the key that it waits for
    chain: tuple[Frame, ...] = ()  # the program's own lines that led to the call, innermost first; () = unknown
    grad: bool | None = None  # whether gradients were enabled at the call; None = unknown
    tid: int | None = None  # native id of the calling thread
    transfers: str = ""  # of a batch_isend_irecv call in a locked run, as described at protocol.CALL


@stored_as(caught_at="handled")
@dataclass(frozen=True, kw_only=True)
class CaughtException:
    """Exceptions of one type and line that the program caught, or that left a module's forward."""

    step: int  # optimizer step of the first exception
    type: str
    place: Place | None  # the line that raised it
    count: int = 1
    last_step: int | None = None  # optimizer step of the latest one; None = not recorded
    chain: tuple[Frame, ...] = ()  # the program's own lines, innermost first; empty = unknown
    caught_at: Place | None = None  # where the program caught it; None = not caught, or unknown (Python 3.11)
    left_forward: bool = True  # it left the forward of a module


@dataclass(frozen=True, kw_only=True)
class CallCount:
    """The number of collective calls that a rank made in one process group.

    All calls count, even if the status file no longer stores them. Transfers and waits on handles do not count. A hash
    over the calls allows ranks to be compared.
    """

    calls: int
    hash: int  # equal on ranks that made the same calls in the same order


@stored_as(is_exhausted="ended")
@dataclass(frozen=True, kw_only=True)
class DataLoaderProgress:
    """The number of batches that a DataLoader of the program has returned."""

    number: int  # DataLoaders are numbered in the order of first use
    iterators: int  # number of iterators so far; more than one = the DataLoader was restarted
    batches: int  # number of batches from the latest iterator
    is_exhausted: bool  # the latest iterator is exhausted
    chain: tuple[Frame, ...] = ()  # the program's own lines that created it, innermost first


@dataclass(frozen=True, kw_only=True)
class StoreKeyWrites:
    """The store keys that were set by one line of the program."""

    key: str  # the latest key; the beginning of a long key is cut off
    count: int  # number of keys that the line has set
    at_s: float  # when it set the latest key
    chain: tuple[Frame, ...]  # the program's own lines that led to the call, innermost first


@dataclass(frozen=True, kw_only=True)
class ForwardMode:
    """The mode, such as training or evaluation, in which a rank's latest forward pass ran."""

    training: bool  # module.training
    gradients: bool  # torch.is_grad_enabled()


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A module of the model, and the line of the program that called it."""

    name: str
    place: Place | None  # None: the line belongs to a library


@stored_as(is_complete="whole")
@dataclass(frozen=True, kw_only=True)
class StepForwards:
    """The modules whose forward methods were called in one optimizer step, in the order of the calls."""

    step: int
    is_complete: bool  # the status file still has the first module of the step
    calls: tuple[int, ...]  # indices into StatusFile.modules


TRAINING = frozenset({"data", "forward", "backward", "optimizer", "step"})  # kinds of training events
ENTRANCE = "init_process_group"
CREATIONS = frozenset({"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"})


class Ending(StrEnum):
    """The reason why nsa-harness stopped watching a run. The verdict follows from this and from other evidence."""

    EXITED = "exited"  # the launcher has exited; ranks that outlive it are terminated soon after
    STALL = "stall"  # the harness proved that the run makes no more progress, and terminated it
    DEADLINE = "deadline"  # the run was still running at its deadline, and the harness terminated it
    EARLY = "early"  # the harness terminated it without a proof: it was blocked like a run that was proven to hang
    INTERRUPTED = "interrupted"  # Ctrl-C
    CONTROLLER_DIED = "abandoned"  # the controller died; the reaper ended the run
    NOT_LAUNCHED = "not_launched"  # the launcher could not be started
    RESTARTED = "restarted"  # the ranks of an observed job have exited, and the job has started new ranks
    DETACHED = "detached"  # the harness only observed the job, which continues
    POST_MORTEM = "unwatched"  # a post-mortem: only the job's files are known


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The Python stack of one thread."""

    thread: str  # name of the thread
    tid: int | None  # native thread id; None if the source does not show it (faulthandler)
    active: bool  # running on a CPU or holding the GIL, if the source shows it
    frames: tuple[Frame, ...]  # innermost first
    source: str  # the tool that read the stack: "py-spy", "py-spy --nonblocking", "faulthandler"
    gil: bool = False  # holds the GIL, if the source shows it
    loop: str = ""  # for a sleeping thread: the source text of the program's innermost loop around the sleep
    native: tuple[str, ...] = ()  # C functions below the innermost Python frame, innermost first: "sleep (libc.so.6)"
    # Arguments `src`, `dst` and `tag` of the collective call that the thread is in, if the source shows them.
    arguments: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation that a rank entered, as recorded by torch's flight recorder."""

    group: str  # name of the process group
    seq: int  # number of the collective in its group
    op: str
    sizes: tuple[tuple[int, ...], ...]  # shape of each input tensor
    dtypes: tuple[str, ...]
    retired: bool  # the collective has completed
    created_ns: int  # CLOCK_REALTIME
    started: bool | None = None  # on the device; None = not recorded (gloo)
    frames: tuple[Frame, ...] = ()  # the stack that entered it, innermost first; only in pickled dumps


@stored_as(from_python="called")
@dataclass(frozen=True, kw_only=True)
class Tally:
    """The number of times that a rank entered one kind of collective during one optimizer step."""

    group: str
    op: str
    from_python: bool  # called from Python; False = called below Python, such as DDP's buckets or FSDP
    count: int


@stored_as(last_step="until")
@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A range of consecutive optimizer steps in which a rank entered the same collectives."""

    step: int  # the first of these steps
    last_step: int
    done_s: float | None  # when the last step was done; None = it is in progress
    gradients: int | None  # number of parameters with a gradient when the optimizer began; None = unknown
    tallies: tuple[Tally, ...]  # sorted by group, operation, from_python


@stored_in_form(groups=stored_groups)
@stored_as(
    ended_by_exception="raised",
    events="marks",
    heartbeat_frame="seen",
    caught_exceptions="caught",
    events_per_step="marked",
    checkpoint_without_gradient="unfed_checkpoint",
    optimizer_chain="stepped_from",
    exit_chain="left_from",
    has_optimizer="optimizer",
)
@dataclass(frozen=True, kw_only=True)
class StatusFile:
    """The content of a status file, in which one process records its progress."""

    pid: int
    rank: int | None
    world_size: int | None
    created_s: float
    beat_s: float | None  # latest time at which the heartbeat thread ran
    exit_s: float | None  # orderly end of the interpreter
    ended_by_exception: bool
    events: tuple[ProgressEvent, ...]  # of each thread the latest training event and the latest other; latest first
    gaps_s: dict[str, float]  # kind of event -> longest pause after an event of this kind
    steps_s: tuple[tuple[int, float], ...]  # (optimizer step, time at which it was done)
    calls: tuple[Call, ...]  # oldest first
    enqueued: int  # collectives that the flight recorder has recorded, summed over the process groups
    completed: int  # collectives of these that have completed
    collectives_changed_s: float | None  # when one of these two numbers changed last
    heartbeat_frame: Frame | None = None  # the main thread's innermost line outside torch at the last heartbeat
    gradients: dict[int, int] = field(default_factory=dict)  # step -> parameters with a gradient before the optimizer
    caught_exceptions: tuple[CaughtException, ...] = ()
    events_per_step: dict[int, int] = field(default_factory=dict)  # finished step -> number of its training events
    groups: dict[str, StoredRanks] = field(default_factory=dict)  # process group -> its members' global ranks
    mesh: tuple[tuple[str, int], ...] = ()  # this rank's coordinates in the device mesh: (axis, coordinate)
    backend: str = ""  # backend of the default process group, as the rank reports it
    device_pending: int = 0  # CUDA events that the probe recorded and the GPU has not reached
    device_completed: int = 0  # CUDA events that the GPU has reached
    device_changed_s: float | None = None  # when the GPU reached the latest of them
    # The line of the program that called a reentrant checkpoint without an input that has a gradient.
    checkpoint_without_gradient: Place | None = None
    # The program's own lines that called the optimizer, or sys.exit or os._exit; innermost first, without directories.
    optimizer_chain: tuple[Frame, ...] = ()
    exit_chain: tuple[Frame, ...] = ()
    stopped: dict[int, tuple[Frame, ...]] = field(default_factory=dict)  # process that it stopped -> its lines
    has_optimizer: bool = True  # the program created an optimizer; without one there are no steps to count
    autograd_nodes: int | None = None  # nodes of the first backward pass; protocol.NODES_LIMIT = at least that many
    realtime_ns: int | None = None  # CLOCK_REALTIME minus CLOCK_MONOTONIC when the file was created
    zero_ns: int | None = None  # CLOCK_REALTIME at second 0 of the run, to convert the flight recorder's times
    counts: dict[str, CallCount] = field(default_factory=dict)  # process group -> number of calls
    loaders: tuple[DataLoaderProgress, ...] = ()
    keys_set: tuple[StoreKeyWrites, ...] = ()
    mode: ForwardMode | None = None
    modules: tuple[ModuleCall, ...] = ()  # modules that the steps in `forwards` entered, each once
    forwards: tuple[StepForwards, ...] = ()  # the latest steps of the training thread, oldest first

    def modules_entered(self, step: int) -> tuple[ModuleCall, ...] | None:
        """Return the modules called in `step`, in the order of the calls, or None if not all of them were recorded."""
        calls = next((forward.calls for forward in self.forwards if forward.step == step and forward.is_complete), None)
        return None if calls is None else tuple(self.modules[call] for call in calls if call < len(self.modules))

    @property
    def latest_event(self) -> ProgressEvent | None:
        """The latest progress event of any thread, or None if no event was recorded."""
        return self.events[0] if self.events else None

    @property
    def latest_training_event(self) -> ProgressEvent | None:
        """The latest data, forward, backward, optimizer or step event of any thread, or None if there is none."""
        return next((event for event in self.events if event.kind in TRAINING), None)

    @property
    def step(self) -> int:
        """The optimizer step in progress, from 1. A finished step counts until the next batch or forward begins."""
        return self.latest_training_event.step if self.latest_training_event else 1

    @property
    def position(self) -> int:
        """The number of training events recorded so far in the current optimizer step."""
        return self.latest_training_event.position if self.latest_training_event else 0


@stored_as(status_file="board", query_bytes="asked_bytes", is_from_dump="dumped")
@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """The state of one rank at the time of a snapshot."""

    rank: int
    pid: int
    process: Process | None  # None = the process has gone, or its state is unknown
    children: tuple[Process, ...] = ()
    stacks: tuple[Stack, ...] = ()
    child_stacks: dict[int, tuple[Stack, ...]] = field(default_factory=dict)  # by process id
    status_file: StatusFile | None = None
    collectives: tuple[Collective, ...] = ()  # the latest of each group, and all that are not retired
    query_bytes: int = 0  # the part of process.io_bytes that nsa-harness's own earlier queries caused
    proof: str | None = None  # file with the stacks, relative to the attempt's directory
    is_from_dump: bool = False  # from a dump of a blocked rank that another program took; its process state is unknown


@stored_as(user_frame="user")
@dataclass(frozen=True, kw_only=True)
class ChildSample:
    """The line that a rank's child process was executing while the rank waited for it."""

    pid: int
    leaf: Frame | None  # innermost Python frame
    user_frame: Frame | None  # innermost frame of the user's own code


@stored_as(user_frame="user", only_line_changed="another_line", child_samples="below")
@dataclass(frozen=True, kw_only=True)
class Sample:
    """A short record of what one rank was doing at one moment."""

    rank: int
    at_s: float
    motion: str  # core.verdict.motion.Motion
    leaf: Frame | None  # innermost Python frame of the training thread
    user_frame: Frame | None  # innermost frame of the user's own code
    cpu_s: float | None  # CPU time of the process so far
    only_line_changed: bool = False  # its only sign of progress is that the training thread is on another line
    wakes_at_s: float | None = None  # latest end of the timed sleep or wait in which the training thread is
    child_samples: tuple[ChildSample, ...] = ()  # of all processes that the rank waits for, if they only compute


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The states of all ranks and GPUs of a run at one moment."""

    number: int  # snapshots are numbered within their run
    at_s: float
    ranks: tuple[RankSnapshot, ...]
    gpus: tuple[Gpu, ...] = ()  # only if a process of the run uses one
    communicators: tuple[NcclCommunicator, ...] = ()  # only if NCCL's RAS service runs in a rank

    @cached_property
    def of_rank(self) -> dict[int, RankSnapshot]:
        """A dict from each rank to its state. If a rank occurs twice, its first state counts."""
        return {rank.rank: rank for rank in reversed(self.ranks)}


@stored_as(during_teardown="by_us")
@dataclass(frozen=True, kw_only=True)
class Exit:
    """The exit of a rank or of the launcher."""

    pid: int  # 0 = the process had exited before it was observed
    rank: int | None  # None = the launcher
    status: int | None  # exit code, or minus the signal; None = unknown
    at_s: float
    during_teardown: bool  # the process exited after the harness had begun to terminate the run


@dataclass(frozen=True, kw_only=True)
class Hint:
    """A name that explains one of torch's error messages, such as the name of the parameter concerned."""

    # The kind of message: "without gradient", "ready twice", "recomputed", "in place", "open file", "hiding file"
    kind: str
    name: str  # name of the parameter, function, operation or file; for "open file" after the number of descriptors
    frame: Frame | None = None  # the line of the program that uses it


@dataclass(frozen=True, kw_only=True)
class EarlierError:
    """An exception that led to a later one: its `__cause__` or `__context__`, or passed on by a process or thread."""

    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    explicit: bool = True  # from `raise ... from`, or passed on; False = it was being handled when the other was raised


@dataclass(frozen=True, kw_only=True)
class RaisedException:
    """The exception that ended a rank's program, together with the exceptions that led to it."""

    rank: int
    at_s: float | None  # None = the exception is only known from the log
    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    proof: str  # file that shows the exception, relative to the attempt's directory
    hints: tuple[Hint, ...] = ()
    chain: tuple[EarlierError, ...] = ()  # the exceptions that preceded it, the nearest first
    is_uncaught: bool = False  # the interpreter reported it as uncaught; False = unknown


@stored_as(is_recomputation="recomputed")
@dataclass(frozen=True, kw_only=True)
class DebugMessage:
    """A message from the debug mode of autograd (anomaly detection) or of activation checkpointing."""

    operation: str
    frames: tuple[Frame, ...]  # the stack of the forward pass that called the operation, innermost first
    instead: str = ""  # the operation that a recomputation called instead; empty = none
    is_recomputation: bool = False  # printed by checkpointing's debug mode; False = by autograd's anomaly detection


@stored_as(
    exception="raised",
    status_file="board",
    warnings="warned",
    debug_message="debugged",
    health="looks",
    exit_messages="last_words",
    background_failures="deaths",
)
@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """Everything that was observed about one rank during the run."""

    rank: int
    pid: int | None
    exit: Exit | None
    exception: RaisedException | None
    status_file: StatusFile | None
    collectives: tuple[Collective, ...]
    death_stacks: tuple[Stack, ...]  # from faulthandler, written on a fatal signal; the main thread comes last
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None
    traces: RankTraces
    last_loss: float | None
    error_lines: tuple[str, ...]  # last lines of stderr that name an error, escaped
    ledger: tuple[StepRow, ...] = ()  # the steps that status file and recorder still have completely, oldest first
    planned_steps: int | None = None  # number of optimizer steps that the program plans, if it reports one
    warnings: tuple[str, ...] = ()  # warnings of torch on stderr that some diagnosis rule needs, each once
    debug_message: DebugMessage | None = None
    health: HealthSamples | None = None  # None = the probe took no sample
    exit_messages: tuple[PrintedMessage, ...] = ()  # printed while the interpreter exited
    background_failures: tuple[PrintedMessage, ...] = ()  # tracebacks of its threads and child processes, oldest first
    memory: tuple[MemoryAtEvent, ...] = ()  # memory that the rank reported at boot, in its latest dump and heartbeat
    died_in_native_thread: bool = False  # a thread without Python, such as gloo's, raised the fatal signal
    last_line: str = ""  # the last line of its log, for a job that was not watched
    has_log: bool = False  # torchrun made a log file for the rank, so it started the rank
    coverage: Coverage | None = None  # the lines that it executed; None = unknown, such as on a Python before 3.12


@stored_as(no_progress_s="quiet_s")
@dataclass(frozen=True, kw_only=True)
class Retraction:
    """The retraction of a reported hang of an observed job, which made progress again."""

    at_s: float  # when the hang was taken as proven
    kind: str  # a HangKind
    reason: str
    no_progress_s: float  # time between the last progress before the proof and the first progress after it


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source code of one of the program's functions, as read when the run was judged."""

    file: str
    first: int  # number of the first line
    text: str
    hook: str = ""  # qualified name of a method that a framework calls, such as "Stop.on_train_batch_end"


@dataclass(frozen=True, kw_only=True)
class ClockSkew:
    """The difference between the clocks of two nodes of a job: what to add to a node's times, and how sure this is."""

    offset_s: float  # to be added to the node's times
    clock_s: float | None  # how far its wall clock is ahead of the first node's; None = unknown
    error_s: float | None  # largest error of `clock_s`; None = nothing shows the true order of events


@stored_in_form(groups=stored_groups)
@stored_as(
    unkillable="undead",
    retractions="retracted",
    bucket_order="buckets_ready",
    launcher_reports_ranks="agent",
    is_observed="observed",
    is_attached="attached",
    program_records="reported",
)
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All observations of one attempt to run a job, made on one node and reduced to a size limit."""

    schema: int = 1
    node: str
    world_size: int
    backend: str
    ending: Ending
    limits: Limits  # the limits in force at the end of the run
    ended_s: float  # when the harness began to terminate the run, or when the last process exited
    launch_s: float | None  # time of the slowest rank's first event after start-up; None = unknown
    teardown_s: float  # time that it took to terminate the run
    launcher: Exit | None
    launcher_error: str | None  # why the launcher could not start
    ranks: tuple[RankEvidence, ...]
    exits: tuple[Exit, ...]  # in order of time
    snapshots: tuple[Snapshot, ...]  # the first and the last two snapshots of the last stall
    samples: tuple[Sample, ...]  # every sample taken during a suspected stall, oldest first
    last_progress_s: float | None  # time of the latest event or collective of any rank
    leftovers: tuple[str, ...]  # processes that outlived the run, as "pid command"
    # Processes that the harness could not kill, each with its owner and the reason; None = this was not checked.
    unkillable: tuple[str, ...] | None
    metrics: dict[str, float]  # numbers that the program reported: loss_first, loss_last, steps, tokens_per_s, ...
    trouble: tuple[Trouble, ...]  # what could not be observed
    retractions: tuple[Retraction, ...] = ()
    gradient_order: OrderDifference | None = None  # if the program traced gradients and ranks differ
    bucket_order: BucketOrder | None = None  # if the program traced DDP's buckets on at least two ranks
    launcher_reports_ranks: bool = True  # the launcher exits with 0 only if every rank did
    is_observed: bool = False  # the job was started by another launcher; the harness terminates it only on request
    is_attached: bool = False  # observing began while the job was already running, so its start is unknown
    hiding_file: str = ""  # the file that the launcher imported instead of an installed package
    last_lines: tuple[str, ...] = ()  # lines of the job's output that name an error, if no rank was observed
    signals: tuple[SentSignal, ...] = ()  # signals with a known sender
    memory: HostMemory | None = None
    network: Network = field(default_factory=Network)
    program_records: tuple[dict[str, float | str], ...] = ()  # records of the shipped program, for its own rules only
    sources: tuple[Source, ...] = ()  # source text around the lines that this evidence names
    disk_full: str | None = None  # how the reaper noticed that the run's disk is full; None = it is not full
    groups: dict[str, StoredRanks] = field(default_factory=dict)  # members from a dump, if no status file has them
    nccl: NcclInfo | None = None  # from NCCL's log; None = NCCL wrote nothing
    # For a job whose nodes were observed by an agent each:
    nodes: dict[int, str] = field(default_factory=dict)  # rank -> its node; {} = only one node was observed
    clocks: dict[str, ClockSkew] = field(default_factory=dict)  # node -> its clock, compared with the first node's
    lost_nodes: tuple[str, ...] = ()  # nodes whose agent ended before the ranks did
    missing_nodes: tuple[str, ...] = ()  # nodes of the job on which no agent was started

    @cached_property
    def of_rank(self) -> dict[int, RankEvidence]:
        """A dict from each rank to its evidence. If a rank occurs twice, its first evidence counts."""
        return {rank.rank: rank for rank in reversed(self.ranks)}

    @cached_property
    def samples_of_rank(self) -> dict[int, list[Sample]]:
        """A dict from each rank to its samples, oldest first. Ranks without samples are missing."""
        samples: dict[int, list[Sample]] = {}
        for sample in self.samples:
            samples.setdefault(sample.rank, []).append(sample)
        return samples
