"""Evidence: what was seen of one run, per rank, as values. Everything a verdict may use is here.

Times are seconds since the launch of the run (the guardian's start), on the node's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nsa_harness.core.evidence.gradients import BucketsReady, OutOfOrder, RankTraces
from nsa_harness.core.evidence.health_samples import HealthSamples, LastMessages
from nsa_harness.core.evidence.host import Gpu, HostMemory, MemoryAtEvent, NcclInfo, Process, SentSignal
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Place, Trouble


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The newest mark of one thread, read from the board."""

    tid: int
    kind: str  # protocol.KINDS
    name: str  # module, operation or stage
    step: int  # optimizer step in progress, 1-based
    at_s: float
    count: int
    position: int = 0  # training marks of the process since the step began


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective called from Python, from the board."""

    number: int
    op: str
    group: str
    place: Place | None
    elements: int  # of init_process_group, the world size that it was given
    dtype: str
    step: int
    entered_s: float
    left_s: float | None  # None = still inside
    position: int = 0  # training marks (data, forward, backward, optimizer) since the step began: where in the program
    peer: int | None = None  # global rank of a point-to-point partner, or of the root of a broadcast, gather and so on
    key: str = ""  # what a store wait waits for
    chain: tuple[Frame, ...] = ()  # the program's own lines that led here, innermost first; () = not known
    grad: bool | None = None  # what is computed there is recorded for a backward pass; None = not known
    tid: int | None = None  # native id of the thread that called


@dataclass(frozen=True, kw_only=True)
class CaughtException:
    """A kind of exception that left a module's forward, or that the program's own code caught."""

    step: int  # of the first
    type: str
    place: Place | None
    count: int = 1
    last_step: int | None = None  # None: a board that tells the first ones alone
    chain: tuple[Frame, ...] = ()  # the program's own lines, innermost first; empty: not told
    handled: Place | None = None  # where the program's own code caught it; None: not told (Python before 3.12), or not
    left_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class CallCount:
    """Of one process group all that was ever called, transfers and waits left out, whatever was kept of it."""

    calls: int
    hash: int  # equal on ranks that did the same in the same order


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A DataLoader, and how far its newest iterator is."""

    number: int  # in the order in which they were first used
    iterators: int  # so far; more than one = it was restarted
    batches: int  # that the newest one gave
    ended: bool  # the newest one has no more
    chain: tuple[Frame, ...] = ()  # the program's own lines that made it, innermost first


@dataclass(frozen=True, kw_only=True)
class KeySet:
    """A line of the program that sets keys of a store."""

    key: str  # the newest, its beginning cut
    count: int
    at_s: float
    chain: tuple[Frame, ...]  # innermost first


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the newest forward ran that was inside no other one."""

    training: bool  # module.training
    gradients: bool


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A module, and the line that called it."""

    name: str
    place: Place | None  # None: a line of a library


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """The modules that a step went into, in the order in which their forwards began."""

    step: int
    whole: bool  # the first of them is the step's first
    calls: tuple[int, ...]  # places in Board.modules


TRAINING = frozenset({"data", "forward", "backward", "optimizer", "step"})  # kinds of marks
ENTRANCE = "init_process_group"
CREATIONS = frozenset({"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"})


class Ending(StrEnum):
    """Why the watching ended. It is a fact about the harness, not yet a verdict about the run."""

    EXITED = "exited"  # the launcher has left; ranks that outlive it are ended soon after
    STALL = "stall"  # proven to move no more, and ended by us; a suspicion alone ends nothing
    DEADLINE = "deadline"  # still there at its deadline, ended by us
    EARLY = "early"  # nothing proven, and ended by us: it stood as another run did that was proven to hang
    INTERRUPTED = "interrupted"  # Ctrl-C
    ABANDONED = "abandoned"  # the controller died; the guardian ended the run
    NOT_LAUNCHED = "not_launched"  # the launcher could not be started
    RESTARTED = "restarted"  # these ranks of an observed job have left, and it has started others in their place
    DETACHED = "detached"  # the harness only looked, and the job runs on
    UNWATCHED = "unwatched"  # nobody looked: it is known by the files that it left


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The Python frames of one thread, innermost first."""

    thread: str
    tid: int | None  # native thread id; None where the source does not tell (faulthandler)
    active: bool  # running on a CPU or holding the GIL, as far as the source tells
    frames: tuple[Frame, ...]
    source: str  # "py-spy", "py-spy --nonblocking", "faulthandler"
    gil: bool = False  # holds the interpreter's lock, as far as the source tells
    loop: str = ""  # of a thread in a sleep: the text of the program's innermost loop around it
    native: tuple[str, ...] = ()  # C functions below the innermost Python frame, innermost first: "sleep (libc.so.6)"
    arguments: dict[str, int] = field(default_factory=dict)  # root or partner, of the operation between ranks it is in


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective as the flight recorder saw it. On gloo `retired` is the completion bit."""

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    retired: bool
    created_ns: int  # CLOCK_REALTIME
    started: bool | None = None  # on the device; None = the recorder does not say (gloo)
    frames: tuple[Frame, ...] = ()  # that entered it, innermost first; of a dump that somebody else took


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How often one rank entered one kind of collective during one step."""

    group: str
    op: str
    called: bool  # from Python; False = below it: DDP's buckets, FSDP
    count: int


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Equal optimizer steps of one rank in a row, as the board and the flight recorder saw them together."""

    step: int  # the first of them
    until: int  # the last of them
    done_s: float | None  # the last of them; None = in progress
    gradients: int | None  # parameters with a gradient as the optimizer began; None = not known
    tallies: tuple[Tally, ...]  # by group, operation, called


@dataclass(frozen=True, kw_only=True)
class StatusFile:
    """The progress board of one process."""

    pid: int
    rank: int | None
    world_size: int | None
    created_s: float
    beat_s: float | None
    exit_s: float | None  # orderly end of the interpreter
    raised: bool
    marks: tuple[ProgressEvent, ...]  # newest of each thread, newest first
    gaps_s: dict[str, float]  # longest quiet after a mark of each kind
    steps_s: tuple[tuple[int, float], ...]  # (step, time it was done)
    calls: tuple[Call, ...]  # oldest first
    enqueued: int
    completed: int
    collectives_changed_s: float | None
    seen: Frame | None = None  # the user's line that the beat thread saw last, at `beat_s`
    gradients: dict[int, int] = field(default_factory=dict)  # step -> parameters with a gradient as the optimizer began
    caught: tuple[CaughtException, ...] = ()
    marked: dict[int, int] = field(default_factory=dict)  # step -> training marks in it, as it was done
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # process group -> its members' global ranks
    mesh: tuple[tuple[str, int], ...] = ()  # this rank's place: (axis, coordinate)
    backend: str = ""  # of the default process group, as the rank found it
    device_pending: int = 0  # events recorded at marks that the GPU has not reached
    device_completed: int = 0
    device_changed_s: float | None = None  # when it reached the last one
    unfed_checkpoint: Place | None = None  # the user's line of a reentrant checkpoint whose inputs have no gradient
    stepped_from: tuple[Frame, ...] = ()  # the user's lines that led to the optimizer, innermost first; no directories
    left_from: tuple[Frame, ...] = ()  # the user's lines that led to sys.exit or os._exit, as those of stepped_from
    optimizer: bool = True  # one was made; without any there are no steps to count
    autograd_nodes: int | None = None  # of the first backward pass; protocol.NODES_LIMIT = that or more
    realtime_ns: int | None = None  # CLOCK_REALTIME minus CLOCK_MONOTONIC at the creation
    zero_ns: int | None = None  # CLOCK_REALTIME at second 0: places what the flight recorder saw
    counts: dict[str, CallCount] = field(default_factory=dict)  # by process group
    loaders: tuple[Loader, ...] = ()
    keys_set: tuple[KeySet, ...] = ()
    mode: Mode | None = None
    modules: tuple[ModuleCall, ...] = ()  # that the steps below went into, each once
    forwards: tuple[Forwards, ...] = ()  # of the newest steps, oldest first; of the thread that began the newest one

    def entered(self, step: int) -> tuple[ModuleCall, ...] | None:
        """The modules of that step in their order; None where they are not known from the first on."""
        found = next((one.calls for one in self.forwards if one.step == step and one.whole), None)
        return None if found is None else tuple(self.modules[call] for call in found if call < len(self.modules))

    @property
    def newest(self) -> ProgressEvent | None:
        return self.marks[0] if self.marks else None

    @property
    def training(self) -> ProgressEvent | None:
        """The newest mark of training itself: data, forward, backward, optimizer, step."""
        return next((mark for mark in self.marks if mark.kind in TRAINING), None)

    @property
    def step(self) -> int:
        """The step in progress, 1-based; a finished one until the next batch or forward begins."""
        return self.training.step if self.training else 1

    @property
    def position(self) -> int:
        """How far the program is in that step, in training marks."""
        return self.training.position if self.training else 0


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """One rank at one moment."""

    rank: int
    pid: int
    process: Process | None
    children: tuple[Process, ...] = ()
    stacks: tuple[Stack, ...] = ()
    child_stacks: dict[int, tuple[Stack, ...]] = field(default_factory=dict)
    board: StatusFile | None = None
    collectives: tuple[Collective, ...] = ()  # newest of each group, and all that are not retired
    asked_bytes: int = 0  # part of process.io_bytes that our own earlier questions cost
    proof: str | None = None  # file with the stacks, relative to the attempt
    dumped: bool = False  # known by what others took of it at one moment: of its process nothing is known, and it stood


@dataclass(frozen=True, kw_only=True)
class ChildSample:
    """A process that computes, below a rank that waits for it."""

    pid: int
    leaf: Frame | None
    user: Frame | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rank at one moment, in short: enough to say later whether it moved and where its time went."""

    rank: int
    at_s: float
    motion: str  # core.verdict.motion.Motion
    leaf: Frame | None  # innermost Python frame of the training thread
    user: Frame | None  # innermost frame of the user's own code
    cpu_s: float | None
    another_line: bool = False  # it moved only in that it stood on another line
    wakes_at_s: float | None = None  # end of the sleep that the thread that trains stands in
    below: tuple[ChildSample, ...] = ()  # all that the rank waits for, where nothing but their computing goes on


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All ranks at one moment."""

    number: int
    at_s: float
    ranks: tuple[RankSnapshot, ...]
    gpus: tuple[Gpu, ...] = ()  # only where a process of the run holds one


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of one process."""

    pid: int  # 0 = it had ended before anybody looked
    rank: int | None  # None = the launcher
    status: int | None  # exit code, or minus the signal; None = not seen
    at_s: float
    by_us: bool  # after the harness began to end the run


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What torch's message means in the program's own words, found by the probe as the exception ended it."""

    kind: str  # "without gradient", "ready twice", "recomputed", "in place"
    name: str  # of the parameter, the function, the operation
    frame: Frame | None = None  # the user's line that uses it


@dataclass(frozen=True, kw_only=True)
class EarlierError:
    """An exception behind another one: handed on by another process or thread, or there before it."""

    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    explicit: bool = True  # `raise ... from`, or handed on; else the other one came up while this one was handled


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The exception that ended a rank's program."""

    rank: int
    at_s: float | None
    type: str
    message: str
    frames: tuple[Frame, ...]  # innermost first
    proof: str
    hints: tuple[Hint, ...] = ()
    chain: tuple[EarlierError, ...] = ()  # what led to it, the nearest first


@dataclass(frozen=True, kw_only=True)
class Debugged:
    """What torch said of one operation in a debugging mode that somebody switched on."""

    operation: str
    frames: tuple[Frame, ...]  # where the forward pass called it, innermost first
    instead: str = ""  # what a recomputation called in its place; empty = nothing
    recomputed: bool = False  # checkpointing's debug mode; else autograd's anomaly detection


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank after the run."""

    rank: int
    pid: int | None
    exit: Exit | None
    raised: Raised | None
    board: StatusFile | None
    collectives: tuple[Collective, ...]
    death_stacks: tuple[Stack, ...]  # faulthandler's, written on a fatal signal
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None
    traces: RankTraces
    last_loss: float | None
    error_lines: tuple[str, ...]  # last lines of stderr that name an error, escaped
    ledger: tuple[StepRow, ...] = ()  # the steps that board and recorder still remember whole, oldest first
    planned_steps: int | None = None  # optimizer steps in all, where the program says so in its heartbeat
    warned: tuple[str, ...] = ()  # warnings of torch's on stderr that some rule reads, each once
    debugged: Debugged | None = None
    looks: HealthSamples | None = None  # at its numbers, between the steps; None = the probe took none
    last_words: tuple[LastMessages, ...] = ()
    deaths: tuple[LastMessages, ...] = ()  # of its threads and children, as they printed them, oldest first
    memory: tuple[MemoryAtEvent, ...] = ()  # as it said itself: at boot, in its newest dump, in its newest heartbeat


@dataclass(frozen=True, kw_only=True)
class Retraction:
    """A proof that the run itself took back: it moved again. Only a job that is left alone can do that."""

    at_s: float  # of the proof
    kind: str
    reason: str
    quiet_s: float  # from the last progress before to the first after


@dataclass(frozen=True, kw_only=True)
class Source:
    """A function of the program, or a statement outside of functions, as it stood when the run was judged."""

    file: str
    first: int  # line
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One attempt, reduced. Merging nodes is a pure function of these."""

    schema: int = 1
    node: str
    world_size: int
    backend: str
    ending: Ending
    limits: Limits  # as they were in force at the end
    ended_s: float  # when the harness began to end it, or when the last process left
    launch_s: float | None  # first mark of the slowest rank after start-up
    teardown_s: float
    launcher: Exit | None
    launcher_error: str | None  # why the launcher could not start
    ranks: tuple[RankEvidence, ...]
    exits: tuple[Exit, ...]  # in order of time
    snapshots: tuple[Snapshot, ...]  # of the last episode: the first and the last two
    samples: tuple[Sample, ...]  # every look taken while something was suspected, oldest first
    last_progress_s: float | None  # newest mark or collective of any rank
    leftovers: tuple[str, ...]  # processes that outlived the run, as "pid command"
    undead: tuple[str, ...] | None  # processes that we could not end, with owner and reason; None = nobody looked
    metrics: dict[str, float]  # loss_first, loss_last, steps, tokens_per_s, ... as the program reported
    trouble: tuple[Trouble, ...]
    retracted: tuple[Retraction, ...] = ()
    gradient_order: OutOfOrder | None = None  # where the program traced it and ranks differ
    buckets_ready: BucketsReady | None = None  # where the program traced them on two ranks
    agent: bool = True  # the launcher ends with 0 only where every rank did
    observed: bool = False  # somebody else's job: it is not ended by us unless that was asked for
    attached: bool = False  # found as it ran: nobody knows how it was started, nor what was before
    last_lines: tuple[str, ...] = ()  # of the job's whole output those that name an error, where no rank was seen
    signals: tuple[SentSignal, ...] = ()  # as far as their senders are known
    memory: HostMemory | None = None
    reported: tuple[dict[str, float | str], ...] = ()  # by the program, of what its own rules alone read
    sources: tuple[Source, ...] = ()  # of the lines that all of this names
    disk_full: str | None = None  # how the guardian met the end of the run's disk; None = it did not
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # members, as a dump says, where no board does
    nccl: NcclInfo | None = None  # None = it wrote nothing
