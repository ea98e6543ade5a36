"""Reads and extends the ledger, a file that lists all tested claims with their results.

The ledger is the file claims.jsonl next to the runs. Lines are only added. A reader skips and counts the lines that it
cannot read. These are incomplete lines, whose writer was killed, and lines that a later version wrote in another
format. A line that is added after an incomplete line begins on a new line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import ValidationError

from nsa_harness.core.report import doc
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.storage.adapters import json_object, type_adapter
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

NAME = "claims.jsonl"
_LOCK = ".claims.lock"
_LOCK_LIMIT_S = 30.0  # limit for waiting while another process adds a line


@dataclass(frozen=True, kw_only=True)
class LedgerSide:
    """The run counts and the failure rate of one of the two launches that a claim compares."""

    what: Annotated[str, doc("the value of the side")]
    spec_hash: Annotated[str, doc("twelve hex digits over everything that decides what runs")]
    failed: Annotated[int, doc("runs that failed")]
    of: Annotated[int, doc("runs that were judged")]
    rate: Annotated[float | None, doc("share of them that failed; null where none was judged")]
    low: Annotated[float, doc("the lowest share of failures, at the confidence")]
    high: Annotated[float, doc("the highest share of failures, at the confidence")]
    ends: Annotated[Mapping[str, int], doc("how runs failed, and how often")] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A line of the ledger, which describes one tested claim or one verification.

    The sides of a verification are the failed run and its repetitions.
    """

    schema: Annotated[int, doc("1")] = 1
    kind: Annotated[str, doc("claim or verify")]
    at: Annotated[str, doc("when it was written: UTC, as ISO 8601 writes it")]
    text: Annotated[str, doc("the claim")]
    result: Annotated[
        str, doc("supported, refuted, undecided or not comparable; fixed, not fixed, fails otherwise or undecided")
    ]
    why: Annotated[str, doc("the evidence for the result")]
    fixed: Annotated[str | None, doc("yes, not yet or no; null where nothing failed before")]
    computes: Annotated[str, doc("the same, what differs, or not known")]
    scenario: Annotated[str, doc("name of the scenario")]
    key: Annotated[str, doc("the key in which the sides differ")]
    sides: Annotated[tuple[LedgerSide, ...], doc("without what is claimed to help, and with it")]
    confidence: Annotated[float, doc("of the result")]
    attempts: Annotated[int, doc("launches")]
    seconds: Annotated[float, doc("of all launches together")]
    runs: Annotated[tuple[str, ...], doc("names of run directories")]
    commit: Annotated[str | None, doc("of the working directory; null: it is no checkout")]
    dirty: Annotated[bool | None, doc("whether the checkout had changes that are not committed; null: it is none")]
    machine: Annotated[str, doc("name of the machine")]
    command: Annotated[str, doc("as typed, without secrets")]
    order_seed: Annotated[int | None, doc("seed of the order within the pairs of a claim; null: nothing was drawn")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All lines of a ledger file that could be read."""

    lines: tuple[LedgerLine, ...]  # oldest first
    unread_count: int  # how many lines could not be read


def add_line(parent: Path, line: LedgerLine, redaction: Redaction) -> Path:
    """Add a line to the ledger below `parent`, and return its path. Raise StoredRunError or OSError if that fails."""
    path, directory = parent / NAME, SafeDirectory(parent)
    text = redaction.json(json.dumps(json_object(line), separators=(",", ":")))
    try:
        with FileLock(parent / _LOCK, timeout=_LOCK_LIMIT_S):
            directory.append(path, f"{_newline_if_incomplete(directory, path)}{text}\n")
    except Timeout:
        raise StoredRunError(f"{path}: another nsa-harness has been writing to it for {_LOCK_LIMIT_S:g} s") from None
    return path


def read_ledger(parent: Path) -> Ledger:
    """Return the ledger of the runs below `parent`. The ledger is empty if no claim was tested."""
    directory, path = SafeDirectory(parent), parent / NAME
    lines, unread_count = [], 0
    for text in directory.read_lines(path, _MAX_LINE):
        if not text.strip():
            continue
        try:
            lines.append(type_adapter(LedgerLine).validate_json(text))
        except ValidationError:
            unread_count += 1
    return Ledger(lines=tuple(lines), unread_count=unread_count)


_MAX_LINE = 1 << 20


def _newline_if_incomplete(directory: SafeDirectory, path: Path) -> str:
    """Return a newline if the file is not empty and does not end with one, otherwise ""."""
    return "" if directory.read_tail(path)[-1:] in ("", "\n") else "\n"
