"""The words a scenario may use: enumerations, and text that is checked as it is read."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from harness.core.declared.layers import parse_layers
from harness.core.declared.yaml_tree import shown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@=,:+-]{0,119}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# torchrun sets these for each rank; a declared value would be lost or break the rendezvous.
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


class CommHook(StrEnum):
    NONE = "none"
    BF16 = "bf16"


class Unit(StrEnum):
    PLAIN = "plain"
    UNIFORM = "uniform"  # multiples of ln(vocabulary), the loss of guessing: the same bound fits every shape


class FaultKind(StrEnum):
    DEADLOCK = "deadlock"
    SKIP_COLLECTIVE = "skip_collective"
    RAISE = "raise"
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    EXIT0 = "exit0"
    ENDLESS_LOOP = "endless_loop"
    SLOW_STEP = "slow_step"


class ExpectedVerdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    HANG = "HANG"


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(f"expected a word of letters, digits, _ . and -, got {shown(value)}")
    return value


def _name(value: str) -> str:
    # A name becomes a folder of the run directory.
    if not NAME.fullmatch(value):
        raise ValueError(f"expected a name of letters, digits and _ . @ = , : + -, got {shown(value)}")
    return value


def _branch(value: str) -> str:
    branches = value.split("+")
    if value != "all" and (not set(branches) <= {"cmp", "sel", "win"} or len(set(branches)) < len(branches)):
        raise ValueError(f"expected all, cmp, sel, win or a pair such as cmp+sel, got {shown(value)}")
    return value


def _auto(value: object) -> object:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"expected a number of seconds or auto, got {shown(value)}")
    return None if value == "auto" else value


def _env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} cannot be the name of an environment variable")
    if name in _LAUNCHER_SETS or name.startswith("_NSA_HARNESS_"):
        raise ValueError(f"{name} is set by the launcher; remove it")
    return name


def _env_value(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected text or a whole number, got {shown(value)}; quote it")
    return value


def _regex(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {shown(value)}: {error}") from None
    if not groups:
        raise ValueError(f"expected a group around the number, such as loss=([0-9.]+), got {shown(value)}")
    return value


Name = Annotated[str, AfterValidator(_name)]
Word = Annotated[str, AfterValidator(_word)]
Branch = Annotated[str, AfterValidator(_branch)]
Regex = Annotated[str, AfterValidator(_regex)]
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
    BeforeValidator(_auto),
    PlainSerializer(lambda seconds: "auto" if seconds is None else seconds),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "number", "exclusiveMinimum": 0}]}),
]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[str, BeforeValidator(_env_value), WithJsonSchema({"type": ["string", "integer"]})]
