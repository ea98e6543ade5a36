"""The types of command-line option values, and the parsers that read them from strings.

Each parser raises ValueError with the expected and the actual text.
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
    """The built-in data sources of `--data`."""

    SYNTHETIC = "synthetic"
    TEXT = "text"
    STORIES = "stories"


@dataclass(frozen=True)
class HubData:
    """A data set on the Hugging Face hub, written as `hf:PATH[:CONFIG[:SPLIT]]`."""

    path: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return ":".join(("hf", self.path, self.config or "", self.split))


# The data set that `--data fineweb_edu` means.
FINEWEB_EDU = HubData("HuggingFaceFW/fineweb-edu", "sample-10BT")


class Packing(StrEnum):
    """The arrangement of documents in the rows of a batch."""

    AUTO = "auto"  # `documents` if the data has documents and the model supports packing, otherwise `stream`
    DOCUMENTS = "documents"  # documents in one row do not attend to each other
    STREAM = "stream"  # each row is one sequence, even across document boundaries


class BadShards(StrEnum):
    """The response to a damaged data shard: skip it, or stop the run."""

    SKIP = "skip"
    STOP = "stop"


class Phase(StrEnum):
    """How much of each training step a run executes: only its data, or up to one of its passes, or all of it."""

    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"


class Decay(StrEnum):
    """The way the learning rate decays after the warm-up."""

    NONE = "none"
    COSINE = "cosine"
    LINEAR = "linear"


class Wrapper(StrEnum):
    """The way the model is distributed over ranks."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP1 = "fsdp1"
    MANUAL = "manual"


SHARDED = (Wrapper.FSDP, Wrapper.FSDP1)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
MEAN = "mean"  # the value of --loss for which the loss is the mean of the logits
EVERY_LAYER = "all"
NO_LAYER = "none"


@dataclass(frozen=True)
class Layers:
    """The layers that use gradient checkpointing: all, a range, or single layers."""

    every: bool = False
    start: int = 0
    stop: int = 0
    members: tuple[int, ...] = ()

    def of(self, layers: int) -> frozenset[int]:
        """Return the numbers of these layers in a model with `layers` layers."""
        if self.every:
            return frozenset(range(layers))
        return frozenset(range(self.start, self.stop)) | frozenset(self.members)

    def highest(self) -> int:
        """Return the highest layer number that was given explicitly, or -1 if there is none."""
        return max(self.of(0), default=-1)


def layer_range(text: str) -> Layers:
    """Parse a half-open range of layer numbers such as "0:6"."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ValueError(f'expected "start:stop" with start < stop, got "{text}"')
    return Layers(start=int(start), stop=int(stop))


def layer_set(text: str) -> Layers:
    """Parse a comma-separated list of layer numbers such as "2,6"."""
    members = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in members):
        raise ValueError(f'expected layer numbers such as "2,6", got "{text}"')
    return Layers(members=tuple(sorted({int(part) for part in members})))


def checkpointed_layers(text: str) -> Layers:
    """Parse "all", "none", a range such as "0:6" or a set such as "2,6"."""
    if text in (EVERY_LAYER, NO_LAYER):
        return Layers(every=text == EVERY_LAYER)
    try:
        return layer_range(text) if ":" in text else layer_set(text)
    except ValueError:
        raise ValueError(f'expected none, all, a range such as "0:6" or a set such as "2,6", got "{text}"') from None


def branches(text: str) -> tuple[Branch, ...]:
    """Parse "all" or branch names joined by "+"."""
    if text == "all":
        return ALL_BRANCHES
    names = text.split("+")
    if len(set(names)) != len(names) or not set(names) <= set(Branch):
        raise ValueError(f'expected all, cmp, sel, win or a sum such as "cmp+sel", got "{text}"')
    return tuple(branch for branch in ALL_BRANCHES if branch in names)


def one_branch(text: str) -> tuple[Branch, ...]:
    """Parse the name of a single branch."""
    return (one_of(Branch)(text),)


def one_of(enum: type[StrEnum]) -> Callable[[str], Any]:
    """Return a parser that accepts only the values of `enum`."""

    def parse(text: str) -> StrEnum:
        if text not in set(enum):
            raise ValueError(f'expected {_alternatives(tuple(enum))}, got "{text}"')
        return enum(text)

    return parse


def word(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only the words in `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f'expected {_alternatives(choices)}, got "{text}"')
        return text

    return parse


def switch(text: str) -> bool:
    """Parse 1, true, yes or on as True, and 0, false, no or off as False."""
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f'expected 1 or 0, got "{text}"')
    return text.lower() in ("1", "true", "yes", "on")


def on_or_off(text: str) -> bool:
    """Parse a value as `switch` does, for an option that is on by default and therefore always needs a value."""
    return switch(text)


def whole(least: int) -> Callable[[str], int]:
    """Return a parser for whole numbers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ValueError(f'expected a whole number of at least {least}, got "{text}"')
        return int(text)

    return parse


def _number(text: str, expected: str, *, is_valid: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not (is_valid(number) and number < float("inf")):
        raise ValueError(f'expected a number {expected}, got "{text}"')
    return number


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    return _number(text, "above 0", is_valid=lambda number: number > 0.0)


def not_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    return _number(text, "of at least 0", is_valid=lambda number: number >= 0.0)


def fraction(text: str) -> float:
    """Parse a number of at least 0 and below 1."""
    return _number(text, "of at least 0 and below 1", is_valid=lambda number: 0.0 <= number < 1.0)


def data_source(text: str) -> Data | Path | HubData:
    """Parse a built-in data source, a Hugging Face data set, or a file, directory or glob pattern."""
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
    """Parse "bytes" or the path of an existing tokenizer file."""
    if text != "bytes" and not Path(text).is_file():
        raise ValueError(f'expected bytes or the path of a tokenizer.json or a file of ranks, got "{text}"')
    return text


class Resume(StrEnum):
    """The values of `--resume` that are not paths.

    `auto` resumes from the latest checkpoint in the output directory, if there is one.
    """

    AUTO = "auto"


def checkpoint_source(text: str) -> Resume | Path:
    """Parse "auto" or the path of an existing checkpoint."""
    if text in set(Resume):
        return Resume(text)
    return existing_checkpoint(text)


def existing_checkpoint(text: str) -> Path:
    """Parse the path of an existing checkpoint directory, or of a directory that contains checkpoints."""
    if not Path(text).is_dir():
        raise ValueError(f'expected the path of a checkpoint or of a folder of them, got "{text}"')
    return Path(text)


def named_shape(text: str) -> NSAConfig:
    """Parse the name of a model configuration in SHAPES."""
    if text not in SHAPES:
        raise ValueError(f'expected {_alternatives(tuple(SHAPES))}, got "{text}"')
    return SHAPES[text]


def ddp_switch(text: str) -> Wrapper:
    """Parse a value as `switch` does. Return DDP if it is on, otherwise no wrapper."""
    return Wrapper.DDP if switch(text) else Wrapper.NONE


def flash_switch(text: str) -> Implementation:
    """Parse a value as `switch` does. Return flash-attn if it is on, otherwise the automatic choice."""
    return Implementation.FLASH if switch(text) else Implementation.AUTO


def _alternatives(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
