"""The report of a run, including the outcome of each scenario and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.fields import FieldInfo

from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.plan import DiagnosticRerun
from nsa_harness.core.stored_keys import stored_as


def doc(text: str) -> FieldInfo:
    """Return a pydantic field whose description `nsa-harness schema` prints."""
    info: FieldInfo = Field(description=text)
    return info


def _number_from_json(value: object) -> object:
    """Return the number that a string such as "nan" represents, or any other value unchanged."""
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON cannot write; reports store their names as text
Number = Annotated[
    float,
    BeforeValidator(_number_from_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}),
]
Ranks = Annotated[tuple[int, ...], doc("global ranks")]
Rank = Annotated[int, doc("global rank")]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A location in the program: its source line, module, layer and parameter, if known."""

    file: Annotated[str | None, doc("absolute path; null when unknown")] = None
    line: Annotated[int | None, doc("from 1; null when unknown")] = None
    function: Annotated[str | None, doc("name of the function; null when unknown")] = None
    module: Annotated[str | None, doc("of the model, such as blocks.3.attn; null when unknown")] = None
    layer: Annotated[int | None, doc("from 0; null when unknown")] = None
    parameter: Annotated[str | None, doc("of the model; null when unknown")] = None
    text: Annotated[str | None, doc("the statement; null when it was not stored")] = None


OptionalPlace = Annotated[Place | None, doc("a line of the program; or null")]


# A value that a sentence is made from, and the values of one sentence by name.
Fact: TypeAlias = "bool | int | float | str | Place | Sequence[Fact] | Mapping[str, Fact] | None"
Facts: TypeAlias = Mapping[str, Fact]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that could not be observed, and the reason."""

    what: Annotated[str, doc("what could not be observed")]
    why: Annotated[str, doc("the reason")]
    rank: Annotated[int | None, doc("global rank; null where no single rank is concerned")] = None


class Status(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    HANG = "HANG"
    SKIP = "SKIP"
    ERROR = "ERROR"


RUNS_ON = "not by us: it runs on"  # the end of a job that was only attached to
SUSPECTED = "suspected"  # an observed job that made no progress
STILL_RUNNING = "still_running"  # an observed job that makes progress and has not ended
INCONCLUSIVE = "inconclusive"  # a job that was not watched, and whose files show neither a failure nor a hang
UNWATCHED = "nobody watched it"  # the end of a job that only left files


class HangKind(StrEnum):
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    STARVED = "starved"
    STOPPED = "stopped"


class Severity(StrEnum):
    """The severity of a finding about a run."""

    CRITICAL = "critical"  # the results of the run cannot be used
    WARNING = "warning"  # the run ended, and something in it is wrong or uncertain
    INFO = "info"  # announced, or nothing to do with the program


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The way in which an attempt ended, with a sentence that explains it."""

    status: Status
    kind: HangKind | None  # only for HANG
    cause: str | None  # None for PASS
    summary: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRef:
    """One call to a collective operation, identified by its process group and number."""

    group: Annotated[str, doc("name of the process group")]
    seq: Annotated[int | None, doc("number in its group, as the flight recorder counts; null when unknown")]
    op: Annotated[str, doc("operation, such as all_reduce")]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The ranks at fault: other ranks wait for them or fail because of them."""

    ranks: Ranks
    step: Annotated[int | None, doc("optimizer step in progress, from 1; null where no steps are counted")]
    collective: Annotated[CollectiveRef | None, doc("the collective that they are blocked in or skipped; or null")]
    place: OptionalPlace


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something learned about a run, such as the cause of its failure, with its proof and confidence."""

    code: Annotated[str, doc("a code of docs/findings.md")]
    claim: Annotated[str, doc("what was found, as a sentence")]
    ranks: Ranks
    place: OptionalPlace
    confidence: Annotated[float, doc("how sure; 0.9 and above: the evidence leaves no other reading")]
    proof: Annotated[
        tuple[str, ...], doc("files that show it, relative to the run directory; a line number may follow a colon")
    ]
    advice: Annotated[str, doc("what to do")]
    left_open: Annotated[
        tuple[str, ...], doc("other readings of the evidence, and what was not observed; empty where it is certain")
    ] = ()
    facts: Annotated[
        Mapping[str, object],
        doc("values that the claim is made from, by name; they differ between causes, and more may be added"),
    ] = field(default_factory=dict)


@stored_as(blocked_in="stands_in", no_progress_s="quiet_s", is_culprit="culprit")
@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The state of one rank at the end of a run."""

    rank: Rank
    blocked_in: Annotated[str, doc("what the rank is blocked in, or did last")]
    waits_for: Annotated[str, doc("the ranks or the thing that the rank waits for; or empty")]
    no_progress_s: Annotated[float | None, doc("since its last progress; null when unknown")]
    is_culprit: Annotated[bool, doc("whether other ranks wait for it, or fail because of it")]
    coordinates: Annotated[str, doc("the rank's place in the job's mesh, such as dp=1 tp=1; or empty")] = ""


@dataclass(frozen=True, kw_only=True)
class CallStack:
    """The user's lines in the call stack of ranks at the point where they were blocked or failed."""

    ranks: Ranks
    of: Annotated[str, doc('"thread reader", "process 4711" or "ValueError"; empty: the thread that trains')]
    # Never empty: a program without a line of its own shows the library's innermost line.
    frames: Annotated[
        tuple[Place, ...],
        doc("the program's own lines, innermost first; before them the framework's, if ranks differ only there"),
    ]
    innermost: Annotated[
        str, doc("the library function at the end of the calls from the first of these lines; or empty")
    ]
    library: Annotated[int, doc("library frames that are not listed")]
    around: Annotated[
        Place | None, doc("the innermost line between its neighbours, with the last of them as line; or null")
    ]
    proof: Annotated[str | None, doc("file with the whole stack; or null")]


@dataclass(frozen=True, kw_only=True)
class RanksValue:
    """The value of a name on one or more ranks."""

    ranks: Ranks
    value: str


@dataclass(frozen=True, kw_only=True)
class NamedValue:
    """A name of the program and its values on the ranks that had one when they were blocked or failed."""

    name: str  # "stopper.bad" or "len(loader)"
    file: str
    function: str
    line: int | None  # of the condition, loop or call that the name decides; None if it decides none
    decides: bool
    values: tuple[RanksValue, ...]
    definitions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnteredCall:
    """One call to a collective that several ranks entered."""

    op: Annotated[str, doc("the collective")]
    seq: Annotated[int | None, doc("the recorder's number in the group; null when unknown")]
    step: Annotated[int | None, doc("the optimizer step; null when unknown")]
    place: Annotated[Place | None, doc("null: called below Python, such as DDP's own collectives")]
    elements: Annotated[int, doc("of all its tensors")]
    dtype: Annotated[str, doc("of its tensors")]
    peer: Annotated[int | None, doc("the root, where it has one; or null")]
    inside: Annotated[bool, doc("whether the ranks are still in it")]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The ranks' collective calls around the first point at which they differ."""

    group: Annotated[str, doc("the process group")]
    ranks: Annotated[tuple[tuple[int, ...], ...], doc("the ranks of each column, the culprit's first")]
    rows: Annotated[
        tuple[tuple[EnteredCall | None, ...], ...],
        doc("oldest first; null: the ranks of the column entered nothing there"),
    ]
    shared: Annotated[int, doc("number of rows at the beginning that are the same on every rank")]


@stored_as(longest_gap_s="longest_quiet_s")
@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """The loss, memory use and other numbers of one rank in a run that ended normally."""

    rank: Rank
    loss: Annotated[Number | None, doc("the last one; null when unknown")]
    gradients: Annotated[str | None, doc("such as 67 of 67; null when unknown")]
    buckets: Annotated[str | None, doc("of DDP, such as 2 · 0.9 M fp32; null when unknown")]
    longest_gap_s: Annotated[float | None, doc("longest time without progress; null when unknown")]
    peak_rss_bytes: Annotated[int | None, doc("the most memory of this rank; null when unknown")]
    step_s: Annotated[Number | None, doc("median training step")] = None
    step_p90_s: Annotated[Number | None, doc("90th percentile")] = None
    own_s: Annotated[Number | None, doc("outside of collectives")] = None


@stored_as(no_progress_s="quiet_s")
@dataclass(frozen=True, kw_only=True)
class Timing:
    """The durations of the phases of one attempt, in seconds."""

    launch_s: Annotated[
        float | None, doc("from the launch to the first progress event of the slowest rank; null when unknown")
    ]
    wall_s: Annotated[float, doc("from the launch to the end of the last process")]
    no_progress_s: Annotated[float | None, doc("since the last progress; null when unknown")]
    detected_s: Annotated[
        float | None, doc("from the culprit's last progress event, or the first failure, to the verdict; or null")
    ]
    teardown_s: Annotated[float | None, doc("time that ending the processes took; null when unknown")]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Peak memory and training speed of one attempt."""

    peak_rss_bytes: Annotated[int | None, doc("the most memory of any rank; null when unknown")]
    peak_gpu_bytes: Annotated[int | None, doc("the most GPU memory of any rank; null when unknown")]
    tokens_per_s: Annotated[float | None, doc("as the program reports; null when it does not")]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file that belongs to a run, or the reason why the file was not written."""

    path: Annotated[str, doc("relative to the attempt; may be a pattern")]
    count: Annotated[int | None, doc("lines, rows or files; null when absent")]
    absent: Annotated[str | None, doc("why it is not there; null when it is")]


class CountedIn(Enum):
    LINES = "lines"
    ROWS = "rows below the head of a table"
    FILES = "files"


@dataclass(frozen=True, kw_only=True)
class ProgramFile:
    """A kind of file that a program can write into the directory of its attempt."""

    pattern: str
    counted_in: CountedIn
    after: str  # the pattern of every program's files after which it is listed
    absent: str | None  # why it is not there; None: this run's program is not expected to write it


@dataclass(frozen=True, kw_only=True)
class MemoryAt:
    """A rank's memory at one moment. Unknown values are None."""

    rank: Rank
    moment: Annotated[str, doc("boot, dump or end")]
    step: Annotated[int | None, doc("of a dump; null otherwise")]
    rss_bytes: Annotated[int | None, doc("resident memory; null when unknown")]
    allocated_bytes: Annotated[int | None, doc("that torch has given out on the GPU; null when unknown")]
    reserved_bytes: Annotated[int | None, doc("that torch holds on the GPU; null when unknown")]
    allocator_step: Annotated[
        int | None, doc("the step up to which the two before are known, where that is not this moment; else null")
    ]
    device_bytes: Annotated[int | None, doc("of the process on its GPU, as the driver says; null when unknown")]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The time and memory that a training step takes. A value that the program did not report is None."""

    tokens: Annotated[int, doc("of a sequence")]
    layers: Annotated[int, doc("of the model")]
    batch: Annotated[int, doc("sequences of each rank")]
    seconds: Annotated[float | None, doc("the median of the steps that count; null when none does")]
    error: Annotated[float, doc("the standard error of that median, as a share of it")]
    cpu_s: Annotated[float | None, doc("processor seconds of all threads of rank 0, a median like `seconds`")]
    cpu_error: Annotated[float, doc("the standard error of `cpu_s`, as a share of it")]
    steps: Annotated[int, doc("how many steps count; the first does not")]
    nodes: Annotated[int | None, doc("of the autograd graph; null when not reported")]
    bytes: Annotated[int | None, doc("that the graph keeps for the backward pass; null when not reported")]
    peak_bytes: Annotated[int | None, doc("of the GPU, or of the process; null when not reported")]
    implementations: Annotated[tuple[str, ...], doc("of each part of the model, with the part's name")]
    until_tokens: Annotated[
        int | None, doc("the length from which on another implementation runs; null when no length is known")
    ]

    @property
    def tokens_per_s(self) -> float | None:
        return self.batch * self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class SpecSummary:
    """The settings of a launch that are stored in a report, so that two runs can be compared."""

    scenario: str
    about: str
    spec_hash: str = ""
    subject: str = ""
    ranks: int = 0
    backend: str = ""
    device: str = ""  # "cpu", "cuda" or "any"
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # dotted keys that differ from their defaults, with values, sorted
    chosen: tuple[tuple[str, str], ...] = ()  # values of keys that were left to the shape or the machine, sorted
    criteria: tuple[tuple[str, str], ...] = ()  # the limits and expectations that decide a verdict, sorted
    deepening: DiagnosticRerun | None = None  # made to answer a question about another attempt; it never counts


@stored_as(
    passed_checks="checked",
    ruled_out_causes="ruled_out",
    rank_statuses="standings",
    rank_summaries="vitals",
    proof_reason="why",
    ending_text="ended",
    repeat_command="repeat",
    next_command="next",
    rerun_answer="showed",
)
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one attempt of one scenario. `render.documents.report_json` describes the fields."""

    spec: SpecSummary
    attempt: int = 1
    final: bool = True
    verdict: Verdict
    expected: bool = True
    flaky: bool = False
    phase: str | None = None
    culprit: Culprit | None = None
    victims: tuple[int, ...] = ()
    last_step: dict[int, int | None] = field(default_factory=dict)
    exit_codes: dict[int, int | None] = field(default_factory=dict)  # before the harness ended any process
    findings: tuple[Finding, ...] = ()
    trouble: tuple[Trouble, ...] = ()
    timing: Timing = Timing(launch_s=None, wall_s=0.0, no_progress_s=None, detected_s=None, teardown_s=None)
    usage: Usage = Usage(peak_rss_bytes=None, peak_gpu_bytes=None, tokens_per_s=None)
    dir: str = ""
    values: tuple[NamedValue, ...] = ()  # those that decide first
    # report.json stores the following under "detail": only people need it.
    passed_checks: tuple[str, ...] = ()
    ruled_out_causes: tuple[str, ...] = ()
    rank_statuses: tuple[RankStatus, ...] = ()
    rank_summaries: tuple[RankSummary, ...] = ()
    metrics: dict[str, Number] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    proof_reason: str | None = None
    ending_text: str
    repeat_command: str | None = None
    next_command: str | None = None
    missing_gradients: tuple[str, ...] | None = None  # None: not traced on every rank
    last_agreed: str | None = None
    raised: str = ""
    rerun_answer: str | None = None
    stacks: tuple[CallStack, ...] = ()
    divergence: Divergence | None = None
    cost: StepCost | None = None
    memory: tuple[MemoryAt, ...] = ()
    signals: dict[int, str] = field(default_factory=dict)
    nccl: NcclInfo | None = None
    own_status: Status | None = None


class RuleState(StrEnum):
    MATCHED = "fired"
    NOT_MATCHED = "held"
    UNANSWERED = "not reached"


@dataclass(frozen=True, kw_only=True)
class RuleAnswer:
    """A decision rule written before a run, with the result of applying the rule."""

    name: Annotated[str, doc("as the plan names it")]
    when: Annotated[str, doc("its condition, as a text")]
    then: Annotated[str, doc("what was agreed to do")]
    because: Annotated[str, doc("why that follows")]
    state: Annotated[RuleState, doc("fired, held or not reached")]
    why: Annotated[str, doc("the runs that decide it, or what is missing")]
    runs: Annotated[tuple[str, ...], doc("directories of the attempts that decide it")]
    commands: Annotated[tuple[str, ...], doc("the runs to make next, where the gate fired")]
    leads: Annotated[
        bool, doc("whether it is what to do now: the first gate that fired, unless a certain cause goes before it")
    ]


class TreeAnswer(StrEnum):
    YES = "yes"
    NO = "no"
    OPEN = "open"  # no run answers it
    NOT_ASKED = "not asked"  # the path has ended before


@dataclass(frozen=True, kw_only=True)
class TreeStep:
    """One question in a decision tree, together with its answer."""

    question: Annotated[str, doc("as the plan asks it")]
    answer: Annotated[TreeAnswer, doc("yes, no, open or not asked")]
    why: Annotated[str, doc("the runs that answer it, or what is missing")]
    leads_to: Annotated[str | None, doc("null: the path goes on")]
    command: Annotated[str | None, doc("what answers an open question; null otherwise")]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The path taken through a decision tree."""

    steps: Annotated[
        tuple[TreeStep, ...], doc("its questions in order; empty where the cause of every failure is certain")
    ]
    leaf: Annotated[str | None, doc("where it leads; null where every answer was no")]
    made_from: Annotated[str, doc("the runs that it is made from")]

    @property
    def open(self) -> tuple[TreeStep, ...]:
        return tuple(step for step in self.steps if step.answer is TreeAnswer.OPEN)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine on which nsa-harness ran."""

    host: Annotated[str, doc("name of the machine")]
    cpus: Annotated[int, doc("cores")]
    gpus: Annotated[tuple[str, ...], doc("names of the GPUs")]
    torch: Annotated[str | None, doc("version of torch; null: none is installed")]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one run of nsa-harness, with the outcomes of all its scenarios."""

    run_id: str
    harness: str
    machine: MachineFacts
    command: str  # as typed
    interrupted: bool
    outcomes: tuple[Outcome, ...]
    not_run: tuple[str, ...] = ()
    files: tuple[Artifact, ...] = ()
    gates: tuple[RuleAnswer, ...] = ()
    tree: Walk | None = None


def exit_code(report: Report, *, strict: bool = False) -> int:
    """Return the exit code of a run. It is 0 if everything ended as expected.

    130: interrupted. 124: an unexpected HANG. 1: an unexpected FAIL or PASS. 125: a scenario was not judged. With
    `strict`, a skipped scenario also counts as not judged.
    """
    if report.interrupted:
        return 130
    final = [outcome for outcome in report.outcomes if outcome.final]
    surprises = {outcome.verdict.status for outcome in final if not outcome.expected}
    skipped_outcomes = [outcome for outcome in final if outcome.verdict.status is Status.SKIP]
    if Status.HANG in surprises:
        return 124
    if surprises & {Status.FAIL, Status.PASS}:
        return 1
    if any(outcome.verdict.status is Status.ERROR and outcome.verdict.cause != STILL_RUNNING for outcome in final):
        return 125
    if len(skipped_outcomes) == len(final) or (strict and skipped_outcomes):
        return 125
    return 0


def counts(outcomes: Sequence[Outcome]) -> dict[Status, int]:
    """Return, for each status, the number of final outcomes that have it."""
    return {status: sum(o.final and o.verdict.status is status for o in outcomes) for status in Status}
