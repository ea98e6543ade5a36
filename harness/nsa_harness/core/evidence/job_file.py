"""One file that a job left, recognised by its content, whatever its name: a log, a dump, or why it is neither."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.evidence.flight import FlightDump, parse_dump
from nsa_harness.core.evidence.stacks import parse_faulthandler, parse_py_spy, parse_py_spy_text, parse_pystack

_PICKLE, _ELF, _CORE = b"\x80", b"\x7fELF", 4
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04", b"BZh")
EMPTY = "it is empty"
_SNIFFED = 4096
_BINARY = 0.1  # of the first bytes


class Kind(StrEnum):
    LOG = "log"
    RECORDER = "flight recorder dump"
    STACKS = "stack dump"
    CORE = "core file"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One file, and what it turned out to be."""

    name: str
    kind: Kind
    changed_ns: int = 0
    why: str = ""  # of NOTHING: why nothing of it is used
    text: str = ""  # of a log, and of a dump that was printed
    stacks: Mapping[int, tuple[Stack, ...]] = field(default_factory=dict)  # by process; 0 where none is told
    recorder: FlightDump | None = None


def is_document(head: bytes) -> bool:
    """It has to be read whole or not at all: half a pickle or half a JSON document says nothing."""
    return head[:1] == _PICKLE or _json_like(head)


def _json_like(head: bytes) -> bool:
    """A log that begins with "[rank0]: " or "[W1123 02:07:28 ..." is no JSON list."""
    return re.match(rb'\s*(?:\[[\s{"\[\]]|\{[\s"}])', head) is not None


def left_file(name: str, data: bytes, changed_ns: int = 0) -> JobFile:
    """What a file is, by its content. Never raises: what nothing can be made of has a reason."""
    known = JobFile(name=name, kind=Kind.NOTHING, changed_ns=changed_ns)
    if not data.strip():
        return replace(known, why=EMPTY)
    if data[:1] == _PICKLE:
        return _recorder(known, data)
    if data[:4] == _ELF:
        if int.from_bytes(data[16:18], "little") != _CORE:
            return replace(known, why="a program, and no dump of one")
        return replace(known, kind=Kind.CORE)
    if data.startswith(_PACKED):
        return replace(known, why="it is packed; unpack it first")
    head = data[:_SNIFFED]
    strange = sum(byte < 9 or 13 < byte < 27 for byte in head) + head.decode("utf-8", "replace").count("\ufffd")
    if strange > _BINARY * len(head) or b"\0\0" in head:
        return replace(known, why="binary, and no dump that is known")
    if _json_like(head) and (document := _document(known, data)):
        return document
    return _text(known, data.decode("utf-8-sig", errors="replace"))


def _recorder(known: JobFile, data: bytes) -> JobFile:
    try:
        return replace(known, kind=Kind.RECORDER, recorder=parse_dump(data))
    except ValueError as error:
        return replace(known, why=str(error))


def _document(known: JobFile, data: bytes) -> JobFile | None:
    """Of JSON; None where it is a log whose lines are JSON, or begin like it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and "entries" in value:
        return _recorder(known, data)
    try:
        stacks = parse_py_spy(data.decode("utf-8", errors="replace"), "py-spy")
        pids = {one.get("pid") for one in value}
        pid = pids.pop() if len(pids) == 1 else 0
    except (ValueError, TypeError, AttributeError):
        return replace(known, why="JSON, and neither a flight recorder dump nor stacks of py-spy")
    if not stacks:
        return replace(known, why="JSON without anything in it")
    return replace(known, kind=Kind.STACKS, stacks={pid if isinstance(pid, int) else 0: stacks})


_BEGINS_WITH_A_THREAD = re.compile(r"\s*(?:Timeout \([\d:.]+\)!\s+)?(?:Current thread|Thread) 0x[0-9a-f]+ ")


def _text(known: JobFile, text: str) -> JobFile:
    """Of a file that begins with stacks, these; in a log those of faulthandler may stand anywhere."""
    stacks = parse_py_spy_text(text)
    if not stacks and _BEGINS_WITH_A_THREAD.match(text):
        stacks = {0: parse_faulthandler(text)}
    elif not stacks and "Traceback for thread" in text:
        try:
            stacks = {0: parse_pystack(text)}
        except ValueError:
            stacks = {}
    return replace(known, kind=Kind.STACKS if stacks else Kind.LOG, text=text, stacks=stacks)
