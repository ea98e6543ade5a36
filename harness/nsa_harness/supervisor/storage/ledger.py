"""The ledger: claims.jsonl beside the runs: what was claimed and tested, how it ended, and by which runs.

Lines are only ever added. A line that is torn, because its writer was killed, or that a later version wrote in another
form, is passed over and counted; whatever is added after a torn one begins on a line of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.storage.adapters import adapter, plain
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

NAME = "claims.jsonl"
_LOCK = ".claims.lock"
_PATIENCE_S = 30.0  # for others that write a line


@dataclass(frozen=True, kw_only=True)
class LedgerSide:
    """One side with its counts, and the interval in which its rate lies at the confidence of the line."""

    what: str
    spec_hash: str
    failed: int
    of: int
    rate: float | None  # of failures; None: nothing was judged
    low: float
    high: float
    ends: Mapping[str, int] = field(default_factory=dict)  # each bad end


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One claim, or one verification; of the latter the sides are the failed run and its repetitions."""

    schema: int = 1
    kind: str  # "claim" or "verify"
    at: str  # UTC, as ISO 8601 writes it
    text: str
    result: str
    why: str
    fixed: str | None  # "yes", "not yet" or "no"; None: nothing failed
    computes: str  # "the same", or what differs, or why nobody knows
    scenario: str
    key: str  # in which the sides differ
    sides: tuple[LedgerSide, ...]
    confidence: float
    attempts: int
    seconds: float  # of all attempts together
    runs: tuple[str, ...]
    commit: str | None  # of the working directory; None: it is no checkout
    dirty: bool | None  # it had changes that are not committed
    machine: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Ledger:
    lines: tuple[LedgerLine, ...]  # in the order in which they were added
    unread: int  # lines


def add_line(parent: Path, line: LedgerLine, redaction: Redaction) -> Path:
    """Adds it to the ledger of the runs below `parent`, and returns where that is. Raises StoredRunError, OSError."""
    path, door = parent / NAME, SafeDirectory(parent)
    text = redaction.json(json.dumps(plain(line), separators=(",", ":")))
    try:
        with FileLock(parent / _LOCK, timeout=_PATIENCE_S):
            door.append(path, f"{_ending(door, path)}{text}\n")
    except Timeout:
        raise StoredRunError(f"{path}: another nsa-harness has been writing to it for {_PATIENCE_S:g} s") from None
    return path


def read_ledger(parent: Path) -> Ledger:
    """Empty where nothing was ever claimed."""
    door, path = SafeDirectory(parent), parent / NAME
    lines, unread = [], 0
    for text in door.text_lines(path, _MAX_LINE):
        if not text.strip():
            continue
        try:
            lines.append(adapter(LedgerLine).validate_json(text))
        except ValidationError:
            unread += 1
    return Ledger(lines=tuple(lines), unread=unread)


_MAX_LINE = 1 << 20


def _ending(door: SafeDirectory, path: Path) -> str:
    """Ends the last line, where its writer did not."""
    return "" if door.tail(path)[-1:] in ("", "\n") else "\n"
