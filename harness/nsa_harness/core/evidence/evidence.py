"""Evidence: everything that was observed of one run, per rank. A verdict uses nothing else.

Times are seconds since the launch of the run (the reaper's start), on the node's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nsa_harness.core.evidence.gradients import BucketOrder, OrderDifference, RankTraces
from nsa_harness.core.evidence.health_samples import HealthSamples, PrintedMessage
from nsa_harness.core.evidence.host import Gpu, HostMemory, MemoryAtEvent, NcclInfo, Process, SentSignal
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Place, Trouble
from nsa_harness.core.stored_keys import stored_as


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The latest progress event of one thread, from the status file."""

    tid: int
    kind: str  # protocol.KINDS
    name: str  # module, operation or stage
    step: int  # optimizer step in progress, 1-based
    at_s: float
    count: int
    position: int = 0  # training events of the process since the step began


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective called from Python, from the status file."""

    number: int
    op: str
    group: str
    place: Place | None
    elements: int  # for init_process_group: the world size that was passed
    dtype: str
    step: int
    entered_s: float
    left_s: float | None  # None = still inside
    position: int = 0  # training events (data, forward, backward, optimizer) since the step began
    peer: int | None = None  # global rank of a point-to-point partner, or of the root of a broadcast, gather and so on
    key: str = ""  # the key that a store wait waits for
    chain: tuple[Frame, ...] = ()  # the program's own lines that led here, innermost first; () = unknown
    grad: bool | None = None  # the result is recorded for a backward pass; None = unknown
    tid: int | None = None  # native id of the calling thread


@stored_as(caught_at="handled")
@dataclass(frozen=True, kw_only=True)
class CaughtException:
    """A kind of exception that left a module's forward, or that the program's own code caught."""

    step: int  # step of the first one
    type: str
    place: Place | None
    count: int = 1
    last_step: int | None = None  # None: the status file only has the first ones
    chain: tuple[Frame, ...] = ()  # the program's own lines, innermost first; empty = unknown
    caught_at: Place | None = (
        None  # where the program's own code caught it; None = not caught, or unknown (Python 3.11)
    )
    left_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class CallCount:
    """The number of all calls in one process group, stored or not; transfers and waits do not count."""

    calls: int
    hash: int  # equal on ranks that made the same calls in the same order


@stored_as(is_exhausted="ended")
@dataclass(frozen=True, kw_only=True)
class DataLoaderProgress:
    """A DataLoader, and the progress of its latest iterator."""

    number: int  # in the order of first use
    iterators: int  # so far; more than one = it was restarted
    batches: int  # batches from the latest iterator
    is_exhausted: bool  # the latest iterator is exhausted
    chain: tuple[Frame, ...] = ()  # the program's own lines that created it, innermost first


@dataclass(frozen=True, kw_only=True)
class StoreKeyWrites:
    """A line of the program that sets keys of a store."""

    key: str  # the latest key, its beginning cut off
    count: int
    at_s: float
    chain: tuple[Frame, ...]  # innermost first


@dataclass(frozen=True, kw_only=True)
class ForwardMode:
    """The mode of the latest outermost forward."""

    training: bool  # module.training
    gradients: bool


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A module, and the line that called it."""

    name: str
    place: Place | None  # None: the line belongs to a library


@stored_as(is_complete="whole")
@dataclass(frozen=True, kw_only=True)
class StepForwards:
    """The modules that a step entered, in the order in which their forwards began."""

    step: int
    is_complete: bool  # the first of them is the step's first
    calls: tuple[int, ...]  # indices into StatusFile.modules


TRAINING = frozenset({"data", "forward", "backward", "optimizer", "step"})  # kinds of events
ENTRANCE = "init_process_group"
CREATIONS = frozenset({"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"})


class Ending(StrEnum):
    """Why watching ended: a fact about the harness, not yet a verdict about the run."""

    EXITED = "exited"  # the launcher has exited; ranks that outlive it are ended soon after
    STALL = "stall"  # proven to make no more progress, and ended by the harness; a suspicion alone ends nothing
    DEADLINE = "deadline"  # still running at its deadline, ended by the harness
    EARLY = "early"  # not proven, ended by the harness: it was blocked like another run that was proven to hang
    INTERRUPTED = "interrupted"  # Ctrl-C
    CONTROLLER_DIED = "abandoned"  # the controller died; the reaper ended the run
    NOT_LAUNCHED = "not_launched"  # the launcher could not be started
    RESTARTED = "restarted"  # these ranks of an observed job have exited, and the job has started new ones
    DETACHED = "detached"  # the harness only observed, and the job continues
    POST_MORTEM = "unwatched"  # a post-mortem: only the job's files are known


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The Python frames of one thread, innermost first."""

    thread: str
    tid: int | None  # native thread id; None if the source does not show it (faulthandler)
    active: bool  # running on a CPU or holding the GIL, if the source shows it
    frames: tuple[Frame, ...]
    source: str  # "py-spy", "py-spy --nonblocking", "faulthandler"
    gil: bool = False  # holds the GIL, if the source shows it
    loop: str = ""  # for a sleeping thread: the text of the program's innermost loop around the sleep
    native: tuple[str, ...] = ()  # C functions below the innermost Python frame, innermost first: "sleep (libc.so.6)"
    arguments: dict[str, int] = field(default_factory=dict)  # root or partner of the collective call of the thread


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective as the flight recorder recorded it. On gloo `retired` is the completion bit."""

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    retired: bool
    created_ns: int  # CLOCK_REALTIME
    started: bool | None = None  # on the device; None = not recorded (gloo)
    frames: tuple[Frame, ...] = ()  # frames that entered it, innermost first; only in dumps taken by others


@stored_as(from_python="called")
@dataclass(frozen=True, kw_only=True)
class Tally:
    """How often one rank entered one kind of collective during one step."""

    group: str
    op: str
    from_python: bool  # from Python; False = below Python: DDP's buckets, FSDP
    count: int


@stored_as(last_step="until")
@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Consecutive equal optimizer steps of one rank, from the status file and the flight recorder together."""

    step: int  # the first step
    last_step: int  # the last step
    done_s: float | None  # end of the last step; None = in progress
    gradients: int | None  # parameters with a gradient when the optimizer began; None = unknown
    tallies: tuple[Tally, ...]  # by group, operation, called


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
    """The status file of one process: its progress in shared memory."""

    pid: int
    rank: int | None
    world_size: int | None
    created_s: float
    beat_s: float | None
    exit_s: float | None  # orderly end of the interpreter
    ended_by_exception: bool
    events: tuple[ProgressEvent, ...]  # latest event of each thread, latest first
    gaps_s: dict[str, float]  # longest pause after an event of each kind
    steps_s: tuple[tuple[int, float], ...]  # (step, time at which it was done)
    calls: tuple[Call, ...]  # oldest first
    enqueued: int
    completed: int
    collectives_changed_s: float | None
    heartbeat_frame: Frame | None = None  # the user's line that the heartbeat thread saw last, at `beat_s`
    gradients: dict[int, int] = field(default_factory=dict)  # step -> parameters with a gradient as the optimizer began
    caught_exceptions: tuple[CaughtException, ...] = ()
    events_per_step: dict[int, int] = field(default_factory=dict)  # step -> training events in it when it was done
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # process group -> its members' global ranks
    mesh: tuple[tuple[str, int], ...] = ()  # this rank's coordinates: (axis, coordinate)
    backend: str = ""  # backend of the default process group, from the rank
    device_pending: int = 0  # events recorded at progress events that the GPU has not reached
    device_completed: int = 0
    device_changed_s: float | None = None  # when it reached the last one
    checkpoint_without_gradient: Place | None = (
        None  # the user's line of a reentrant checkpoint whose inputs have no gradient
    )
    optimizer_chain: tuple[
        Frame, ...
    ] = ()  # the user's lines that led to the optimizer, innermost first; no directories
    exit_chain: tuple[Frame, ...] = ()  # the user's lines that led to sys.exit or os._exit, in the form of stepped_from
    has_optimizer: bool = True  # the program created an optimizer; without one there are no steps to count
    autograd_nodes: int | None = None  # nodes in the first backward pass; protocol.NODES_LIMIT = at least that many
    realtime_ns: int | None = None  # CLOCK_REALTIME minus CLOCK_MONOTONIC at creation
    zero_ns: int | None = None  # CLOCK_REALTIME at second 0, for the flight recorder's times
    counts: dict[str, CallCount] = field(default_factory=dict)  # by process group
    loaders: tuple[DataLoaderProgress, ...] = ()
    keys_set: tuple[StoreKeyWrites, ...] = ()
    mode: ForwardMode | None = None
    modules: tuple[ModuleCall, ...] = ()  # modules that the steps below entered, each once
    forwards: tuple[StepForwards, ...] = ()  # the latest steps of the thread that began the latest one, oldest first

    def modules_entered(self, step: int) -> tuple[ModuleCall, ...] | None:
        """Return the modules that the step entered, in order; None if the first of them is not known."""
        calls = next((forward.calls for forward in self.forwards if forward.step == step and forward.is_complete), None)
        return None if calls is None else tuple(self.modules[call] for call in calls if call < len(self.modules))

    @property
    def latest_event(self) -> ProgressEvent | None:
        return self.events[0] if self.events else None

    @property
    def latest_training_event(self) -> ProgressEvent | None:
        """The latest event of training itself: data, forward, backward, optimizer, step."""
        return next((mark for mark in self.events if mark.kind in TRAINING), None)

    @property
    def step(self) -> int:
        """The step in progress, 1-based; a finished step until the next batch or forward begins."""
        return self.latest_training_event.step if self.latest_training_event else 1

    @property
    def position(self) -> int:
        """The number of training events in that step so far."""
        return self.latest_training_event.position if self.latest_training_event else 0


@stored_as(status_file="board", query_bytes="asked_bytes", is_from_dump="dumped")
@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """One rank at one moment."""

    rank: int
    pid: int
    process: Process | None
    children: tuple[Process, ...] = ()
    stacks: tuple[Stack, ...] = ()
    child_stacks: dict[int, tuple[Stack, ...]] = field(default_factory=dict)
    status_file: StatusFile | None = None
    collectives: tuple[Collective, ...] = ()  # latest of each group, and all that are not retired
    query_bytes: int = 0  # part of process.io_bytes that our own earlier queries cost
    proof: str | None = None  # file with the stacks, relative to the attempt
    is_from_dump: bool = False  # from a dump of a blocked rank that another program took; its process state is unknown


@stored_as(user_frame="user")
@dataclass(frozen=True, kw_only=True)
class ChildSample:
    """A process that computes below a rank that waits for it."""

    pid: int
    leaf: Frame | None
    user_frame: Frame | None


@stored_as(user_frame="user", only_line_changed="another_line", child_samples="below")
@dataclass(frozen=True, kw_only=True)
class Sample:
    """A summary of one rank at one moment: enough to see later whether it moved and where its time went."""

    rank: int
    at_s: float
    motion: str  # core.verdict.motion.Motion
    leaf: Frame | None  # innermost Python frame of the training thread
    user_frame: Frame | None  # innermost frame of the user's own code
    cpu_s: float | None
    only_line_changed: bool = False  # its only motion is a change of the line
    wakes_at_s: float | None = None  # end of the training thread's sleep
    child_samples: tuple[ChildSample, ...] = ()  # all processes that the rank waits for, if they only compute


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All ranks at one moment."""

    number: int
    at_s: float
    ranks: tuple[RankSnapshot, ...]
    gpus: tuple[Gpu, ...] = ()  # only if a process of the run uses one


@stored_as(during_teardown="by_us")
@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of one process."""

    pid: int  # 0 = it had ended before it was observed
    rank: int | None  # None = the launcher
    status: int | None  # exit code, or minus the signal; None = unknown
    at_s: float
    during_teardown: bool  # after the harness began to end the run


@dataclass(frozen=True, kw_only=True)
class Hint:
    """The meaning of torch's message in the program's own names, found by the probe as the exception ended it."""

    kind: str  # "without gradient", "ready twice", "recomputed", "in place"
    name: str  # name of the parameter, function or operation
    frame: Frame | None = None  # the user's line that uses it


@dataclass(frozen=True, kw_only=True)
class EarlierError:
    """An exception before another one: its cause, its context, or passed on by another process or thread."""

    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    explicit: bool = True  # `raise ... from`, or passed on; False = it was being handled when the other one came up


@dataclass(frozen=True, kw_only=True)
class RaisedException:
    """The exception that ended a rank's program."""

    rank: int
    at_s: float | None
    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    proof: str
    hints: tuple[Hint, ...] = ()
    chain: tuple[EarlierError, ...] = ()  # the exceptions before it, the nearest first


@dataclass(frozen=True, kw_only=True)
class DebugMessage:
    """torch's message about one operation in a debugging mode that the user enabled."""

    operation: str
    frames: tuple[Frame, ...]  # where the forward pass called it, innermost first
    instead: str = ""  # operation that a recomputation called instead; empty = none
    recomputed: bool = False  # checkpointing's debug mode; else autograd's anomaly detection


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
    """The evidence of one rank after the run."""

    rank: int
    pid: int | None
    exit: Exit | None
    exception: RaisedException | None
    status_file: StatusFile | None
    collectives: tuple[Collective, ...]
    death_stacks: tuple[Stack, ...]  # from faulthandler, written on a fatal signal
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None
    traces: RankTraces
    last_loss: float | None
    error_lines: tuple[str, ...]  # last lines of stderr that name an error, escaped
    ledger: tuple[StepRow, ...] = ()  # the steps that status file and recorder still have completely, oldest first
    planned_steps: int | None = None  # planned number of optimizer steps, if the program's heartbeat has it
    warnings: tuple[str, ...] = ()  # torch's warnings on stderr that some rule reads, each once
    debug_message: DebugMessage | None = None
    health: HealthSamples | None = None  # numbers sampled between steps; None = the probe took none
    exit_messages: tuple[PrintedMessage, ...] = ()
    background_failures: tuple[
        PrintedMessage, ...
    ] = ()  # ends of its threads and children, as they were printed, oldest first
    memory: tuple[MemoryAtEvent, ...] = ()  # as the rank reported it: at boot, in its latest dump and heartbeat


@stored_as(no_progress_s="quiet_s")
@dataclass(frozen=True, kw_only=True)
class Retraction:
    """A proof that the run itself refuted by moving again. Only a job that is not ended can do that."""

    at_s: float  # time of the proof
    kind: str
    reason: str
    no_progress_s: float  # from the last progress before to the first after


@dataclass(frozen=True, kw_only=True)
class Source:
    """A function of the program, or a statement outside of functions, as it was when the run was judged."""

    file: str
    first: int  # its first line
    text: str


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
    """The evidence of one attempt, reduced to its size limit. Merging nodes is a pure function of these."""

    schema: int = 1
    node: str
    world_size: int
    backend: str
    ending: Ending
    limits: Limits  # in force at the end
    ended_s: float  # when the harness began to end it, or when the last process exited
    launch_s: float | None  # first event of the slowest rank after start-up
    teardown_s: float
    launcher: Exit | None
    launcher_error: str | None  # why the launcher could not start
    ranks: tuple[RankEvidence, ...]
    exits: tuple[Exit, ...]  # in order of time
    snapshots: tuple[Snapshot, ...]  # the first and the last two of the last stall episode
    samples: tuple[Sample, ...]  # every sample taken during a suspicion, oldest first
    last_progress_s: float | None  # latest event or collective of any rank
    leftovers: tuple[str, ...]  # processes that outlived the run, as "pid command"
    unkillable: (
        tuple[str, ...] | None
    )  # processes that the harness could not end, with owner and reason; None = unchecked
    metrics: dict[str, float]  # loss_first, loss_last, steps, tokens_per_s, ... as the program reported
    trouble: tuple[Trouble, ...]
    retractions: tuple[Retraction, ...] = ()
    gradient_order: OrderDifference | None = None  # if the program traced gradients and ranks differ
    bucket_order: BucketOrder | None = None  # if the program traced them on two ranks
    launcher_reports_ranks: bool = True  # the launcher exits with 0 only if every rank did
    is_observed: bool = False  # another user's job: the harness ends it only on request
    is_attached: bool = False  # found while it ran: its start and its earlier life are unknown
    last_lines: tuple[str, ...] = ()  # lines of the job's output that name an error, if no rank was observed
    signals: tuple[SentSignal, ...] = ()  # as far as the senders are known
    memory: HostMemory | None = None
    program_records: tuple[dict[str, float | str], ...] = ()  # reported by the program, for its own rules only
    sources: tuple[Source, ...] = ()  # for the lines that this evidence names
    disk_full: str | None = None  # how the reaper noticed that the run's disk is full; None = it is not full
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # members from a dump, if no status file has them
    nccl: NcclInfo | None = None  # None = NCCL wrote nothing
