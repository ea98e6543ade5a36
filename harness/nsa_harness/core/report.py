"""Report: what a run comes to, as verdicts, findings and their places, and the exit code that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.plan import DiagnosticRerun


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the program: a source line, and the module, layer and parameter it belongs to, as far as known."""

    file: str | None = None
    line: int | None = None
    function: str | None = None
    module: str | None = None
    layer: int | None = None
    parameter: str | None = None
    text: str | None = None  # the statement


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that could not be observed, and why."""

    what: str
    why: str
    rank: int | None = None


class Status(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    HANG = "HANG"
    SKIP = "SKIP"
    ERROR = "ERROR"


RUNS_ON = "not by us: it runs on"  # how a job ended that was only found
SUSPECTED = "suspected"  # a job that was only looked at, and did not move
STILL_RUNNING = "still_running"  # a job that was only looked at, and moves: nobody has seen its end
INCONCLUSIVE = "inconclusive"  # a job that nobody watched, and its files show neither a failure nor a hang
UNWATCHED = "nobody watched it"  # how a job ended of which there are files alone


class HangKind(StrEnum):
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    STARVED = "starved"
    STOPPED = "stopped"


class Severity(StrEnum):
    """How much a finding matters."""

    CRITICAL = "critical"  # the run cannot be used
    WARNING = "warning"  # it ended, and something in it is wrong or unsure
    INFO = "info"  # announced, or nothing to do with the program


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What happened, with the one sentence that justifies it."""

    status: Status
    kind: HangKind | None  # only for HANG
    cause: str | None  # None for PASS
    summary: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRef:
    group: str
    seq: int | None
    op: str


@dataclass(frozen=True, kw_only=True)
class Culprit:
    ranks: tuple[int, ...]
    step: int | None
    collective: CollectiveRef | None
    place: Place | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A stable code, a claim, and where the proof lies."""

    code: str
    claim: str
    ranks: tuple[int, ...]
    place: Place | None
    confidence: float
    proof: tuple[str, ...]  # paths relative to the run directory, ":line" allowed
    advice: str
    left_open: tuple[str, ...] = ()  # other readings of the evidence, and what was not seen; empty where it is certain


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where one rank stood at the end: a row of the table people read first."""

    rank: int
    stands_in: str
    waits_for: str
    quiet_s: float | None
    culprit: bool
    coordinates: str = ""  # its place in the job's mesh: "dp=1 tp=1"


@dataclass(frozen=True, kw_only=True)
class CallStack:
    """Where ranks stood at the end, or what raised: the program's own lines, innermost first."""

    ranks: tuple[int, ...]
    of: str  # "thread reader", "process 4711", "ValueError"; empty: the thread that trains
    frames: tuple[Place, ...]  # never empty; a library's innermost one where the program has none
    innermost: str  # the library's function that the innermost of these calls in the end; empty: it calls none
    library: int  # frames of libraries, not told
    around: Place | None  # the innermost line between its neighbours, at the last of them; None: not stored
    proof: str | None  # file with the whole stack


@dataclass(frozen=True, kw_only=True)
class EnteredCall:
    """A collective that ranks entered."""

    op: str
    seq: int | None  # the recorder's number in the group
    step: int | None
    place: Place | None  # None: below Python, as DDP's own ones
    elements: int  # of all its tensors
    dtype: str
    peer: int | None  # the root, where it has one
    inside: bool  # they have not come out of it


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The collectives of one group around the first one at which its ranks part: a column a class of ranks."""

    group: str
    ranks: tuple[tuple[int, ...], ...]  # of each column, the culprit's first
    rows: tuple[tuple[EnteredCall | None, ...], ...]  # oldest first; None: nothing was entered there
    shared: int  # so many rows at the beginning were the same on every rank


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank of a run that ended: a row of the PASS screen."""

    rank: int
    loss: float | None
    gradients: str | None  # "67 of 67"
    buckets: str | None  # "2 · 0.9 M fp32"
    longest_quiet_s: float | None
    peak_rss_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    launch_s: float | None
    wall_s: float
    quiet_s: float | None
    detected_s: float | None
    teardown_s: float | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file of the run, or the reason why it is not there."""

    path: str
    count: int | None  # lines, rows or files; None when absent
    absent: str | None


class CountedIn(Enum):
    LINES = "lines"
    ROWS = "rows below the head of a table"
    FILES = "files"


@dataclass(frozen=True, kw_only=True)
class ProgramFile:
    """A file that our program may write into the folder of its attempt."""

    pattern: str
    counted_in: CountedIn
    after: str  # the pattern of every program's files that it is listed behind
    absent: str | None  # why it is not there; None where this run is of another program, which is not asked for it


@dataclass(frozen=True, kw_only=True)
class MemoryAt:
    """What one rank used at one moment; None = not known. At the end nobody asks it: a blocked rank cannot answer."""

    rank: int
    moment: str  # "boot", "dump", "end"
    step: int | None  # of a dump
    rss_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    allocator_step: int | None  # up to which the two are known, where that is not this moment
    device_bytes: int | None  # of its process, as the driver says


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step cost, and of which size it was; None = the program did not say."""

    tokens: int  # of a sequence
    layers: int
    batch: int
    seconds: float | None  # the median of the steps that count
    error: float  # the standard error of that median, as a share of it
    cpu_s: float | None  # processor seconds of all threads of rank 0, as seconds
    cpu_error: float
    steps: int  # how many count: not the first one
    nodes: int | None  # of the autograd graph
    bytes: int | None  # that the graph keeps for the backward pass
    peak_bytes: int | None  # of the GPU, or of the process
    implementations: tuple[str, ...]  # of each part of the model, with the part's name
    until_tokens: int | None  # from which length on another implementation runs; None = no length is known

    @property
    def tokens_per_s(self) -> float | None:
        return self.batch * self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One attempt of one scenario."""

    scenario: str
    about: str
    spec_hash: str
    attempt: int
    final: bool
    verdict: Verdict
    expected: bool
    flaky: bool
    phase: str | None
    culprit: Culprit | None
    victims: tuple[int, ...]
    last_step: dict[int, int | None]
    exit_codes: dict[int, int | None]  # as before our own kill
    findings: tuple[Finding, ...]
    trouble: tuple[Trouble, ...]
    timing: Timing
    usage: Usage
    dir: str
    # What follows is for people; report.json carries it under "detail".
    subject: str
    ranks: int
    backend: str
    notes: tuple[str, ...]
    checked: tuple[str, ...]  # what was looked at and found in order
    not_covered: tuple[str, ...]
    ruled_out: tuple[str, ...]
    standings: tuple[Standing, ...]
    vitals: tuple[RankSummary, ...]
    metrics: dict[str, float]
    artifacts: tuple[Artifact, ...]
    why: str | None  # why a HANG is one: the proof in a sentence
    ended: str  # what was done to the processes
    repeat: str | None  # the command that repeats it
    next: str | None  # the command to go on with
    # What makes two runs comparable; a report of an earlier version has none of it.
    device: str = ""  # "cpu", "cuda" or "any"
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # dotted keys other than their defaults, with values, sorted
    chosen: tuple[tuple[str, str], ...] = ()  # what became of keys that were left to the shape or the machine, sorted
    criteria: tuple[tuple[str, str], ...] = ()  # the limits and expectations that decide a verdict, sorted
    missing_gradients: tuple[str, ...] | None = None  # parameters; None = not traced on every rank
    last_agreed: str | None = None  # of a HANG: the latest collective called from Python that every rank has left
    deepening: DiagnosticRerun | None = None  # made to answer a question of another attempt: it never counts
    showed: str | None = None  # of a deepening: what it says about that attempt
    stacks: tuple[CallStack, ...] = ()  # the culprit's first
    divergence: Divergence | None = None
    cost: StepCost | None = None
    memory: tuple[MemoryAt, ...] = ()  # at boot, at the newest dump, at the end of a run that did not end well
    signals: dict[int, str] = field(default_factory=dict)  # of a rank that we ended: what it does with a signal
    nccl: NcclInfo | None = None  # None: it wrote nothing


class GateState(StrEnum):
    FIRED = "fired"
    HELD = "held"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, kw_only=True)
class GateAnswer:
    """If this, then that, agreed before the run; and what the runs say to it."""

    name: str
    when: str
    then: str
    because: str
    state: GateState
    why: str  # the runs that say so, or what is missing
    runs: tuple[str, ...]  # folders of the attempts that say so
    commands: tuple[str, ...]  # of one that fired: the runs to make next
    leads: bool  # it is what to do now


class TreeAnswer(StrEnum):
    YES = "yes"
    NO = "no"
    OPEN = "open"  # no run answers it
    NOT_ASKED = "not asked"  # the path has ended before


@dataclass(frozen=True, kw_only=True)
class TreeStep:
    question: str
    answer: TreeAnswer
    why: str
    leads_to: str | None  # None: the path goes on
    command: str | None  # of an open question: what answers it


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The way through a decision tree, over the failures whose cause is not certain."""

    steps: tuple[TreeStep, ...]  # empty: the cause of every failure is
    leaf: str | None  # None: every answered question was answered no, and that leads nowhere
    made_from: str  # the runs

    @property
    def open(self) -> tuple[TreeStep, ...]:
        return tuple(step for step in self.steps if step.answer is TreeAnswer.OPEN)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    host: str
    cpus: int
    gpus: tuple[str, ...]
    torch: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    run_id: str
    harness: str
    machine: MachineFacts
    command: str  # as typed
    interrupted: bool
    outcomes: tuple[Outcome, ...]
    not_run: tuple[str, ...] = ()  # scenarios of the plan that were never started
    files: tuple[Artifact, ...] = ()  # made of all attempts together; of an empty one the reason, too
    gates: tuple[GateAnswer, ...] = ()  # in the order agreed; a report of an earlier version has none
    tree: Walk | None = None  # None: there is nothing to ask of it


def exit_code(report: Report, *, strict: bool = False) -> int:
    """124 an unexpected HANG, else 1 an unexpected FAIL or PASS, else 125 not judged, else 0; 130 interrupted."""
    if report.interrupted:
        return 130
    final = [outcome for outcome in report.outcomes if outcome.final]
    surprises = {outcome.verdict.status for outcome in final if not outcome.expected}
    skipped = [outcome for outcome in final if outcome.verdict.status is Status.SKIP]
    if Status.HANG in surprises:
        return 124
    if surprises & {Status.FAIL, Status.PASS}:
        return 1
    if any(outcome.verdict.status is Status.ERROR and outcome.verdict.cause != STILL_RUNNING for outcome in final):
        return 125
    if len(skipped) == len(final) or (strict and skipped):
        return 125
    return 0


def counts(outcomes: Sequence[Outcome]) -> dict[Status, int]:
    """How often each verdict was given, over the outcomes that count, in the order of `Status`."""
    return {status: sum(o.final and o.verdict.status is status for o in outcomes) for status in Status}
