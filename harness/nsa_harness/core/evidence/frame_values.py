"""The values of the names on a rank's call stacks: parsers for the probe's file and for py-spy."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nsa_harness.core.evidence.stacks import is_library

MAX_BYTES = 512 << 10  # of a file; the probe writes at most 64 KB of names and values, and JSON may escape them
_MAX_THREADS = 8
_MAX_FRAMES = 12  # per thread
_MAX_NAMES = 80  # per frame: each name may have a value and a length
_MAX_NAME = 120
_MAX_TEXT = 200
_MAX_CHARS = 64 << 10  # of one rank
_SHOWN_LENGTH = 40  # characters of a text
_STRINGS = ("'", '"')


class ReadWhen(StrEnum):
    """The occasion on which values were read."""

    REQUEST = "request"  # nsa-harness or a failing rank requested them
    EXCEPTION = "exception"  # an exception ended the program
    EXIT = "exit"  # the program called exit, destroyed its process group, or ended
    PY_SPY = "py-spy"


@dataclass(frozen=True, kw_only=True)
class FrameValues:
    """The values of the names that the code of one frame uses, by name: "stopper.bad" or "len(loader)"."""

    file: str
    line: int
    function: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class StackValues:
    """The values on the call stack of one thread, innermost frame first, without frames of libraries."""

    thread: str
    frames: tuple[FrameValues, ...]


@dataclass(frozen=True, kw_only=True)
class ProcessValues:
    """The values on all call stacks of one rank, the main thread's first."""

    rank: int
    when: ReadWhen
    stacks: tuple[StackValues, ...]
    is_cut: bool = False  # not all values were read, because of the limits of time and size


def parse_values(text: str | bytes, rank: int) -> ProcessValues:
    """Return the values in a file that the probe wrote. Raise ValueError if it has another form."""
    try:
        record = json.loads(text)
        stacks = ((str(thread["name"]), thread["frames"]) for thread in record["threads"])
        return _limited(
            rank,
            ReadWhen(record["reason"]),
            ((name, [(frame, frame["file"], frame["function"]) for frame in frames]) for name, frames in stacks),
            lambda frame: ((str(name), str(value)) for name, _, value in frame["values"]),
            is_cut=bool(record["is_cut"]),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"damaged values: {error!r}") from error


def parse_py_spy_values(text: str, rank: int) -> ProcessValues:
    """Return the values in the output of `py-spy dump --locals --json`. Raise ValueError if it has another form."""
    try:
        threads = sorted(json.loads(text), key=lambda thread: thread.get("thread_name") != "MainThread")
        return _limited(
            rank,
            ReadWhen.PY_SPY,
            (
                (
                    str(thread.get("thread_name") or ""),
                    [(frame, frame["filename"], frame["name"]) for frame in thread["frames"]],
                )
                for thread in threads
            ),
            lambda frame: (
                (str(variable["name"]), _as_python(str(variable["repr"])))
                for variable in frame.get("locals") or ()
                if not str(variable["repr"]).startswith("<")  # an object, of which py-spy shows only the address
            ),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"unknown form: {error!r}") from error


def _as_python(text: str) -> str:
    """Return the text of a value as Python writes it: py-spy puts strings in double quotes.

    A long text may be a document or a secret, so only its length and checksum are returned, as the probe does.
    """
    if len(text) > _SHOWN_LENGTH and any(quote in text for quote in _STRINGS):
        return f"{len(text)} characters, crc {zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"
    is_plain = text[:1] == text[-1:] == '"' and "'" not in text and len(text) > 1
    return f"'{text[1:-1]}'" if is_plain else text


def _limited(
    rank: int,
    when: ReadWhen,
    threads: Iterable[tuple[str, list[tuple[Any, Any, Any]]]],
    values_of: Callable[[Any], Iterable[tuple[str, str]]],
    *,
    is_cut: bool = False,
) -> ProcessValues:
    stacks: list[StackValues] = []
    chars_left = _MAX_CHARS
    for thread, all_frames in threads:
        frames: list[FrameValues] = []
        for frame, file, function in all_frames:
            if is_library(str(file)) or str(file).startswith("<") or len(frames) == _MAX_FRAMES or chars_left <= 0:
                continue
            values = tuple((name[:_MAX_NAME], value[:_MAX_TEXT]) for name, value in list(values_of(frame))[:_MAX_NAMES])
            chars_left -= sum(len(name) + len(value) for name, value in values)
            frames.append(
                FrameValues(file=str(file), line=int(frame["line"]), function=str(function)[:_MAX_NAME], values=values)
            )
        if frames and len(stacks) < _MAX_THREADS:
            stacks.append(StackValues(thread=thread[:_MAX_NAME], frames=tuple(frames)))
    return ProcessValues(rank=rank, when=when, stacks=tuple(stacks), is_cut=is_cut or chars_left <= 0)


def with_texts(values: ProcessValues, change: Callable[[str, str], str]) -> ProcessValues:
    """Return the values with each text replaced by `change(name, text)`."""

    def changed(frame: FrameValues) -> FrameValues:
        return replace(frame, values=tuple((name, change(name, text)) for name, text in frame.values))

    return replace(
        values, stacks=tuple(replace(stack, frames=tuple(map(changed, stack.frames))) for stack in values.stacks)
    )


def frames_of(values: ProcessValues) -> Iterator[FrameValues]:
    """Yield the frames of all stacks, those of the main thread first."""
    for stack in values.stacks:
        yield from stack.frames


def unquoted(text: str) -> tuple[str, str]:
    """Return the contents of a string's text and its quote, or the text itself and "" for any other value."""
    quote = text[:1]
    is_string = quote in _STRINGS and len(text) > 1 and text.endswith(quote)
    return (text[1:-1], quote) if is_string else (text, "")
