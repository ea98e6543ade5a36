"""Stores a copy of the program's source code when a run is first judged, for use in later judgements."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

from nsa_harness.core.evidence.evidence import Evidence, Source
from nsa_harness.core.report import Outcome, Place, Trouble
from nsa_harness.core.source_code.collection import program_lines, program_sources
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.supervisor.capture.procfs import path_in_process
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.rundir import AttemptDir

FILE = "sources.json"
_STORED = type_adapter(tuple[Source, ...])
_MAX_BYTES = 256 << 10  # limit for all functions together
_MAX_FILE_BYTES = 1 << 20


def with_sources(attempt: AttemptDir, evidence: Evidence, *, launched_here: bool) -> Evidence:
    """Store the source code of the program, and return the evidence with this source code added.

    Files that were changed since the launch, and files that are not small regular files, are skipped. `launched_here`:
    this process launched the attempt. For any other attempt only stored source is used, because the author of the
    evidence could have chosen arbitrary file names.
    """
    directory, path = attempt.directory, attempt.path / FILE
    try:
        if directory.exists(path):
            sources = stored_sources(attempt)
        elif not launched_here:
            return evidence
        else:
            read = _within_bound(_read(attempt, evidence))
            sources = tuple(replace(source, text=attempt.redaction.text(source.text, code=True)) for source in read)
            directory.write(path, _STORED.dump_json(sources).decode())
            if evidence.is_attached:
                edited = edited_sources(evidence, _attached_since_s(evidence), "the process", _attached_pid(evidence))
                evidence = replace(evidence, trouble=(*evidence.trouble, *edited))
    except (OSError, ValueError) as error:
        trouble = Trouble(what=FILE, why=f"{type(error).__name__}: {str(error)[:200]}")
        return replace(evidence, trouble=(*evidence.trouble, trouble))
    return replace(evidence, sources=sources)


def stored_sources(attempt: AttemptDir) -> tuple[Source, ...]:
    """Return the stored source code of an attempt. Raise OSError or ValueError if it is missing or invalid."""
    return _STORED.validate_json(attempt.directory.read_whole_file(attempt.path / FILE, 4 * _MAX_BYTES))


def _within_bound(sources: Iterator[Source]) -> Iterator[Source]:
    remaining_bytes = _MAX_BYTES
    for source in sources:
        remaining_bytes -= len(source.text.encode("utf-8", "replace"))
        if remaining_bytes >= 0:
            yield source


def _read(attempt: AttemptDir, evidence: Evidence) -> Iterator[Source]:
    since_s = attempt.directory.modified_ns(attempt.spec) / 1e9 or None
    if evidence.is_attached:
        since_s = _attached_since_s(evidence)
    pid = _attached_pid(evidence)
    return program_sources(evidence, lambda file: text_as_launched(file, since_s, pid))


def _attached_since_s(evidence: Evidence) -> float:
    """Return when the job started, which was before nsa-harness: its ranks read their files then."""
    return time.time() - evidence.ended_s


def _attached_pid(evidence: Evidence) -> int | None:
    return next((rank.pid for rank in evidence.ranks if rank.pid), None) if evidence.is_attached else None


def edited_sources(evidence: Evidence, since_s: float, than: str, pid: int | None = None) -> Iterator[Trouble]:
    """Yield a note for each source file in the evidence that was edited after `since_s`, so that it is not read.

    `than`: what the file is newer than, such as "the log".
    """
    for file in program_lines(evidence):
        with suppress(OSError, ValueError):
            path = path_in_process(pid, file) if pid else Path(file)
            if path.suffix == ".py" and path.stat().st_mtime > since_s:
                yield Trouble(what=PurePath(file).name, why=f"newer than {than}, so no condition in it is shown")


def text_as_launched(file: str, since_s: float | None, pid: int | None = None) -> str:
    """Return a source file's text, as the process `pid` sees it, or "" if unreadable or changed since `since_s`."""
    try:
        path = Path(file) if pid is None else path_in_process(pid, file)
        status = path.stat()
        is_readable = (
            path.is_file() and status.st_size <= _MAX_FILE_BYTES and (since_s is None or status.st_mtime <= since_s)
        )
        return path.read_text(encoding="utf-8", errors="replace") if is_readable else ""
    except (OSError, ValueError):  # ValueError: a name with a NUL character
        return ""


def with_source_text(outcome: Outcome, sources: Sequence[Source]) -> Outcome:
    """Return the outcome with the source code at each of its code locations."""
    program = ProgramSource(tuple(sources))

    def with_text(place: Place | None) -> Place | None:
        return place and replace(place, text=program.statement(place))

    culprit = outcome.culprit and replace(outcome.culprit, place=with_text(outcome.culprit.place))
    findings = tuple(replace(finding, place=with_text(finding.place)) for finding in outcome.findings)
    stacks = tuple(
        replace(stack, frames=tuple(replace(frame, text=program.statement(frame)) for frame in stack.frames))
        for stack in outcome.stacks
    )
    return replace(outcome, culprit=culprit, findings=findings, stacks=stacks)
