"""The Pydantic models of a scenario file, which describes one run in YAML."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from nsa_harness.core.plan import MAX_RANKS
from nsa_harness.core.scenario.layers import parse_layers
from nsa_harness.core.scenario.yaml_tree import value_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@=,:+-]{0,119}")
# Files and directories in the directory of a run, in which each scenario gets a directory with its own name.
RESERVED_NAMES = frozenset((
    "test_execution.log", "SUMMARY.md", "report.json", "junit.xml", "report.sarif", "report.html", "events.jsonl",
    "run.json", "plan.json", "secrets.json", "all_missing_params.txt", "ddp_buckets.txt", "bisect.json", "BISECT.md",
    "bisection.json", "probes.jsonl", "worktrees", "mixtures", "trials.jsonl", "claim_state.json", "READINESS.md",
    "readiness.json", "readiness_state.json", "why.json", "why_state.json", "hosts.json",
))  # fmt: skip
_MAX_NAME_CHARS = 120
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# torchrun sets these variables for each rank. A value from the scenario would be lost or break the rendezvous.
_LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Backend(StrEnum):
    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


class Attention(StrEnum):
    NSA = "nsa"
    VANILLA = "vanilla"
    STOCK = "stock"


class Implementation(StrEnum):
    AUTO = "auto"
    EAGER = "eager"
    TRITON = "triton"
    TORCH = "torch"
    FLASH = "flash"
    PER_TOKEN = "per_token"
    DENSE = "dense"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class ShapeName(StrEnum):
    AUTO = "auto"
    CI = "ci"
    MINIMAL = "minimal"
    REPRO = "repro"
    SHOWCASE = "showcase"
    SHAKE = "shake"
    PRODUCTION = "production"


class Phase(StrEnum):
    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"


class CheckpointMode(StrEnum):
    NON_REENTRANT = "non_reentrant"
    REENTRANT = "reentrant"


class Wrapper(StrEnum):
    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP1 = "fsdp1"
    MANUAL = "manual"


class Compression(StrEnum):
    MEAN = "mean"
    MLP = "mlp"
    MEAN_MLP = "mean_mlp"


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    MEAN = "mean"  # the mean of the logits: needs no targets, and has the simplest backward pass


class CommHook(StrEnum):
    NONE = "none"
    BF16 = "bf16"


class Unit(StrEnum):
    PLAIN = "plain"
    UNIFORM = "uniform"  # multiples of ln(vocabulary), the loss of a model that guesses; independent of the model size


class FaultKind(StrEnum):
    DEADLOCK = "deadlock"
    SKIP_COLLECTIVE = "skip_collective"
    RAISE = "raise"
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    EXIT0 = "exit0"
    ENDLESS_LOOP = "endless_loop"
    SLOW_STEP = "slow_step"
    LEAK = "leak"
    SET_PARAMETERS = "set_parameters"
    STARVED_LOADER = "starved_loader"


class ExpectedVerdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    HANG = "HANG"


def _wrong_characters(kind: str, punctuation: str, value: str) -> ValueError:
    characters = " ".join(punctuation)
    return ValueError(f"expected a {kind} of letters, digits and {characters}, got {value_text(value)}")


def _check_word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise _wrong_characters("word", "_.-", value)
    return value


def _check_name(value: str) -> str:
    # The name of a scenario becomes a directory name.
    if len(value) > _MAX_NAME_CHARS:
        raise ValueError(f"expected at most {_MAX_NAME_CHARS} characters, got {len(value)}")
    if not NAME.fullmatch(value):
        raise _wrong_characters("name", "_.@=,:+-", value)
    return value


def _check_not_reserved(value: str) -> str:
    if value in RESERVED_NAMES:
        raise ValueError(f"{value_text(value)} is the name of a file of nsa-harness; choose another name")
    return value


def _check_branch(value: str) -> str:
    branches = value.split("+")
    if value != "all" and (not set(branches) <= {"cmp", "sel", "win"} or len(set(branches)) < len(branches)):
        raise ValueError(f"expected all, cmp, sel, win or a pair such as cmp+sel, got {value_text(value)}")
    return value


def _read_auto(value: object) -> object:
    """Return the value of a time limit, or None if it is `auto`."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"expected a number of seconds or auto, got {value_text(value)}")
    return None if value == "auto" else value


def _check_env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise ValueError(f"{value_text(name)} is not a valid name of an environment variable")
    if name in _LAUNCHER_SETS or name.startswith("_NSA_HARNESS_"):
        raise ValueError(f"{name} is set by the launcher; remove it")
    return name


def _read_env_value(value: object) -> object:
    """Return the value of an environment variable as a string, because YAML reads 1 as a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected text or a whole number, got {value_text(value)}; quote it")
    return value


def _check_regex(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {value_text(value)}: {error}") from None
    if not groups:
        raise ValueError(f"expected parentheses around the number, such as loss=([0-9.]+), got {value_text(value)}")
    return value


Name = Annotated[str, AfterValidator(_check_name)]
ScenarioName = Annotated[Name, AfterValidator(_check_not_reserved)]
Word = Annotated[str, AfterValidator(_check_word)]
Branch = Annotated[str, AfterValidator(_check_branch)]
Regex = Annotated[str, AfterValidator(_check_regex)]
Positive = Annotated[int, Field(ge=1, le=1_000_000_000)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Layers = Annotated[
    str,
    BeforeValidator(parse_layers),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "all"]},
                {"type": "string", "pattern": r"^\d+:\d+$|^\d+(,\d+)*$"},
                {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1},
            ]
        }
    ),
]
AutoSeconds = Annotated[
    Annotated[float, Field(gt=0, le=1e9)] | None,
    BeforeValidator(_read_auto),
    PlainSerializer(lambda seconds: "auto" if seconds is None else seconds),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "number", "exclusiveMinimum": 0}]}),
]
EnvName = Annotated[str, AfterValidator(_check_env_name)]
EnvValue = Annotated[str, BeforeValidator(_read_env_value), WithJsonSchema({"type": ["string", "integer"]})]


OUR_PROGRAM = "nsa.train"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Needs(_Section):
    """The requirements on the machine. If they are not met, the scenario is skipped."""

    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    backend: Backend = Backend.AUTO


class Run(_Section):
    """The program to run, and the way it is launched."""

    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 2
    program: Annotated[str, Field(min_length=1)] = Field(default=OUR_PROGRAM, description="a Python module, or FILE.py")
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="a whole command, launched unchanged; replaces `program`"
    )
    args: tuple[str, ...] = ()
    env: dict[EnvName, EnvValue] = {}
    cwd: str | None = None


class Model(_Section):
    """The model of nsa.train. `auto` chooses a suitable value for the machine."""

    shape: ShapeName = ShapeName.AUTO
    layers: Annotated[int, Field(ge=1, le=1000)] | None = None
    seq_len: Annotated[int, Field(ge=2, le=1_000_000_000)] | None = None
    attention: Attention = Attention.NSA
    branch: Branch = "all"
    compression: Compression | None = None
    stop_gradient_gates: bool = Field(default=False, description="compute the gates, but do not train them")
    compile: bool = Field(default=False, description="compile the layers with torch.compile")
    impl: Implementation = Implementation.AUTO
    dtype: Dtype = Dtype.AUTO


class Train(_Section):
    """The training loop of nsa.train."""

    steps: Positive = 1
    cpu_steps: Positive | None = Field(default=None, description="at most this many steps on a CPU")
    batch: Positive | None = Field(default=None, description="sequences per rank; default: set by the shape")
    accumulate: Positive = 1
    data: Annotated[str, Field(min_length=1)] = Field(default="synthetic", description="synthetic, text, or a file")
    loss: Loss = Field(default=Loss.CROSS_ENTROPY, description="mean: the mean of all logits, without targets")
    seed: Count = 0
    phase: Phase = Phase.STEP
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    clip: Annotated[float, Field(ge=0)] | None = None
    freeze: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="pattern of parameters to freeze"
    )
    checkpoint_every: Count = Field(default=0, description="steps between checkpoints; 0 = none")
    keep_last: Count = Field(default=0, description="how many of the latest checkpoints to keep; 0 = all")
    async_checkpoint: bool = Field(default=False, description="write checkpoints while training continues")
    resume: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="a checkpoint, or a directory with checkpoints, to continue from; or auto"
    )


class Checkpointing(_Section):
    """Gradient checkpointing. Layers are numbered from 0, and ranges are half-open."""

    layers: Layers = "none"
    mode: CheckpointMode = CheckpointMode.NON_REENTRANT


class Parallel(_Section):
    """The way nsa.train makes the model parallel."""

    wrapper: Wrapper = Wrapper.DDP
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: Annotated[float, Field(gt=0)] = 25.0
    comm_hook: CommHook = CommHook.NONE
    barrier_after_backward: bool = Field(default=False, description="call a barrier after each backward pass")


class Trace(_Section):
    """The information that nsa.train prints or writes for diagnosis."""

    grads: bool = True
    module_bwd: bool = False
    buckets: bool = False
    mem_dump_every: Count = Field(default=0, description="steps between memory dumps; 0 = none")
    profile_memory: bool = False
    detect_anomaly: bool = False
    step_cost: bool = False
    mem_snapshot: bool = Field(
        default=False, description="CUDA only: with each memory dump, every allocation with its stack"
    )
    telemetry: bool = Field(default=True, description="write a heartbeat, tables and training checks; false = none")
    tensorboard: bool = Field(default=False, description="write event files, if TensorBoard is installed")


class LimitSection(_Section):
    """Time limits in seconds. For `auto`, nsa-harness chooses a limit suitable for the run."""

    stall_s: AutoSeconds = None
    busy_s: AutoSeconds = None
    open_wait_s: AutoSeconds = None
    start_s: AutoSeconds = None
    deadline_s: AutoSeconds = None


class NumberBound(_Section):
    """Bounds on a number, which must satisfy every bound that is set."""

    lt: float | None = None
    le: float | None = None
    gt: float | None = None
    ge: float | None = None
    eq: float | None = None

    def numbers(self) -> dict[str, float | None]:
        """Return the bounds, keyed by name. Bounds that are not set are None."""
        return {"lt": self.lt, "le": self.le, "gt": self.gt, "ge": self.ge, "eq": self.eq}

    @model_validator(mode="after")
    def _can_be_met(self) -> NumberBound:
        above = max((value for value in (self.gt, self.ge, self.eq) if value is not None), default=None)
        below = min((value for value in (self.lt, self.le, self.eq) if value is not None), default=None)
        if above is None and below is None:
            raise ValueError("expected at least one bound: lt, le, gt, ge or eq")
        strict = self.gt is not None or self.lt is not None
        if above is not None and below is not None and (above > below or (above == below and strict)):
            raise ValueError(f"no number can satisfy these bounds: above {above:g} and below {below:g}")
        return self


class MetricBound(NumberBound):
    """Bounds on a metric, which must satisfy every bound that is set."""

    unit: Unit = Field(default=Unit.PLAIN, description="uniform: the bounds are multiples of ln(vocabulary)")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="nsa.train: apply these bounds only on this device"
    )
    regex: Regex | None = Field(
        default=None, description="other programs: group 1 of the last match in output.log is the value"
    )


class ExpectSection(_Section):
    """The expected result of the run. Any other result counts as a failure."""

    verdict: ExpectedVerdict = ExpectedVerdict.PASS
    cause: Word | None = None
    findings: tuple[Word, ...] = Field(default=(), description="findings that must be reported, even with a PASS")
    missing_grads: Count | None = None
    metrics: dict[Word, MetricBound] = {}


class FaultWhenSection(_Section):
    """Conditions for a planted fault, in addition to its rank and step. All of them must be met."""

    recomputed: Layers | None = Field(default=None, description="all these layers were recomputed in the backward pass")
    any_recomputed: Layers | None = Field(default=None, description="one of these layers was recomputed")
    recomputed_layers: Positive | None = Field(default=None, description="at least this many layers were recomputed")
    seq_len: Positive | None = Field(default=None, description="the sequence has at least this many tokens")
    layers: Positive | None = Field(default=None, description="the model has at least this many layers")
    ranks: Positive | None = Field(default=None, description="the job has at least this many ranks")
    backend: Literal["gloo", "nccl"] | None = Field(default=None, description="the process group has this backend")
    module: Word | None = Field(default=None, description="the model has a module of this class, or is wrapped in one")
    find_unused_parameters: bool | None = Field(
        default=None, description="DDP was created with this value of the option"
    )
    static_graph: bool | None = Field(default=None, description="DDP was created with this value of the option")
    chance: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="probability, drawn once per process"
    )

    @property
    def in_recomputation(self) -> bool:
        """Whether the fault happens while a layer is recomputed."""
        return any(value is not None for value in (self.recomputed, self.any_recomputed, self.recomputed_layers))


class FaultSection(_Section):
    """A fault that is deliberately planted in the program."""

    kind: FaultKind
    rank: Count | None = Field(default=None, description="default: every rank")
    layer: Count | None = None
    step: Positive = 1
    heals_s: Annotated[float, Field(gt=0)] | None = None
    parameters: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="set_parameters: pattern of the parameters"
    )
    value: float = Field(default=0.0, description="set_parameters: the new value of all elements")
    when: FaultWhenSection | None = None


class Scenario(_Section):
    """A complete scenario, with a program, its settings, and the expected result."""

    name: ScenarioName
    about: Annotated[str, Field(max_length=300)] = ""
    tags: tuple[Word, ...] = ()
    aliases: tuple[Name, ...] = ()
    priority: int = Field(default=0, description="scenarios with a higher priority run first")
    needs: Needs = Needs()
    run: Run = Run()
    model: Model = Model()
    train: Train = Train()
    gc: Checkpointing = Checkpointing()
    parallel: Parallel = Parallel()
    trace: Trace = Trace()
    limits: LimitSection = LimitSection()
    expect: ExpectSection = ExpectSection()
    fault: FaultSection | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the program is nsa.train, the training program that comes with nsa-harness."""
        return self.run.command is None and self.run.program == OUR_PROGRAM


class ScenarioFile(Scenario):
    """The content of a scenario file, before `extends` and `matrix` are resolved."""

    name: ScenarioName = Field(default="", description="default: the name of the file", validate_default=False)
    schema_: Literal[1] = Field(default=1, alias="schema")
    extends: str | None = Field(
        default=None, description="a parent, such as base/ddp; maps are merged, lists are replaced"
    )
    matrix: dict[str, Annotated[tuple[JsonValue, ...], Field(min_length=1)]] = Field(
        default={}, description="dotted key: values; each combination is a scenario"
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a scenario file, which editors use for completion and checks."""
    schema = ScenarioFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "nsa-harness scenario"}
