"""What the value of an option may be, and how its text is read.

A parser turns the text of an option into a value and raises ValueError with what it expected and what it got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from glob import glob
from pathlib import Path
from typing import Any

from .config import ALL_BRANCHES, SHAPES, Branch, Implementation, NSAConfig


class Data(StrEnum):
    SYNTHETIC = "synthetic"
    TEXT = "text"
    STORIES = "stories"


@dataclass(frozen=True)
class HubData:
    """A data set of the Hugging Face hub, as `hf:PATH[:CONFIG[:SPLIT]]`."""

    path: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return ":".join(("hf", self.path, self.config or "", self.split))


# By the name that the reports use.
FINEWEB_EDU = HubData("HuggingFaceFW/fineweb-edu", "sample-10BT")


class Packing(StrEnum):
    AUTO = "auto"  # documents, where the data has them and the model takes them
    DOCUMENTS = "documents"  # none sees another one
    STREAM = "stream"  # a row is one sequence, whatever is in it


class BadShards(StrEnum):
    SKIP = "skip"
    STOP = "stop"


class Phase(StrEnum):
    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"


class Decay(StrEnum):
    NONE = "none"
    COSINE = "cosine"
    LINEAR = "linear"


class Wrapper(StrEnum):
    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP1 = "fsdp1"
    MANUAL = "manual"


SHARDED = (Wrapper.FSDP, Wrapper.FSDP1)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
MEAN = "mean"  # of the logits, as a loss
EVERY_LAYER = "all"
NO_LAYER = "none"


@dataclass(frozen=True)
class Layers:
    """Which layers are checkpointed: all, none, a half-open range or a set. A plain value, no model needed."""

    every: bool = False
    start: int = 0
    stop: int = 0
    members: tuple[int, ...] = ()

    def of(self, layers: int) -> frozenset[int]:
        if self.every:
            return frozenset(range(layers))
        return frozenset(range(self.start, self.stop)) | frozenset(self.members)

    def highest(self) -> int:
        return max(self.of(0), default=-1)


def layer_range(text: str) -> Layers:
    start, colon, stop = text.partition(":")
    if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ValueError(f'expected "start:stop" with start < stop, got "{text}"')
    return Layers(start=int(start), stop=int(stop))


def layer_set(text: str) -> Layers:
    members = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in members):
        raise ValueError(f'expected layer numbers such as "2,6", got "{text}"')
    return Layers(members=tuple(sorted({int(part) for part in members})))


def checkpointed_layers(text: str) -> Layers:
    if text in (EVERY_LAYER, NO_LAYER):
        return Layers(every=text == EVERY_LAYER)
    try:
        return layer_range(text) if ":" in text else layer_set(text)
    except ValueError:
        raise ValueError(f'expected none, all, a range such as "0:6" or a set such as "2,6", got "{text}"') from None


def branches(text: str) -> tuple[Branch, ...]:
    if text == "all":
        return ALL_BRANCHES
    names = text.split("+")
    if len(set(names)) != len(names) or not set(names) <= set(Branch):
        raise ValueError(f'expected all, cmp, sel, win or a sum such as "cmp+sel", got "{text}"')
    return tuple(branch for branch in ALL_BRANCHES if branch in names)


def one_branch(text: str) -> tuple[Branch, ...]:
    return (one_of(Branch)(text),)


def one_of(enum: type[StrEnum]) -> Callable[[str], Any]:
    def parse(text: str) -> StrEnum:
        if text not in set(enum):
            raise ValueError(f'expected {_alternatives(tuple(enum))}, got "{text}"')
        return enum(text)

    return parse


def word(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f'expected {_alternatives(choices)}, got "{text}"')
        return text

    return parse


def switch(text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f'expected 1 or 0, got "{text}"')
    return text.lower() in ("1", "true", "yes", "on")


def on_or_off(text: str) -> bool:
    """A switch that is spelled with its value: on in most runs, so that off is what one writes."""
    return switch(text)


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ValueError(f'expected a whole number of at least {least}, got "{text}"')
        return int(text)

    return parse


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f'expected a number above 0, got "{text}"')
    return number


def not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise ValueError(f'expected a number of at least 0, got "{text}"')
    return number


def fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < 1.0:
        raise ValueError(f'expected a number of at least 0 and below 1, got "{text}"')
    return number


def data_source(text: str) -> Data | Path | HubData:
    """A named source, a data set of the hub, or local files: one, a folder of them, or a pattern."""
    if text in set(Data):
        return Data(text)
    if text == "fineweb_edu":
        return FINEWEB_EDU
    if text.startswith("hf:"):
        path, config, split, *more = [*text.removeprefix("hf:").split(":"), "", ""]
        if not path or any(more):
            raise ValueError(f'expected hf:PATH, hf:PATH:CONFIG or hf:PATH:CONFIG:SPLIT, got "{text}"')
        return HubData(path, config or None, split or "train")
    if not Path(text).exists() and not (set("*?[") & set(text) and glob(text, recursive=True)):
        names = f"{', '.join(Data)}, hf:PATH"
        raise ValueError(f'expected {names}, or the path of a file, a folder or a pattern of files, got "{text}"')
    return Path(text)


def tokenizer_source(text: str) -> str:
    if text != "bytes" and not Path(text).is_file():
        raise ValueError(f'expected bytes or the path of a tokenizer.json or a file of ranks, got "{text}"')
    return text


class Resume(StrEnum):
    AUTO = "auto"


def checkpoint_source(text: str) -> Resume | Path:
    if text in set(Resume):
        return Resume(text)
    return existing_checkpoint(text)


def existing_checkpoint(text: str) -> Path:
    if not Path(text).exists():
        raise ValueError(f'expected the path of a checkpoint or of a folder of them, got "{text}"')
    return Path(text)


def named_shape(text: str) -> NSAConfig:
    if text not in SHAPES:
        raise ValueError(f'expected {_alternatives(tuple(SHAPES))}, got "{text}"')
    return SHAPES[text]


def ddp_switch(text: str) -> Wrapper:
    return Wrapper.DDP if switch(text) else Wrapper.NONE


def flash_switch(text: str) -> Implementation:
    return Implementation.FLASH if switch(text) else Implementation.AUTO


def _alternatives(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
