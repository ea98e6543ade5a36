"""The statement at a place: read once, while the file is still the one that ran."""

from __future__ import annotations

import linecache
from dataclasses import replace
from pathlib import Path

from nsa_harness.core.report import Outcome, Place

_MAX_SOURCE_BYTES = 1 << 20


def quoted(outcome: Outcome, launched: Path) -> Outcome:
    """The outcome with the statement at every place it names. `launched`: a file as old as the launch."""
    since_s = launched.stat().st_mtime if launched.exists() else None
    culprit = outcome.culprit
    if culprit is not None:
        culprit = replace(culprit, place=_with_text(culprit.place, since_s))
    findings = tuple(replace(finding, place=_with_text(finding.place, since_s)) for finding in outcome.findings)
    return replace(outcome, culprit=culprit, findings=findings)


def _with_text(place: Place | None, since_s: float | None) -> Place | None:
    if place is None or place.file is None or place.line is None or not _readable(Path(place.file), since_s):
        return place
    linecache.checkcache(place.file)
    text = linecache.getline(place.file, place.line).strip()
    return replace(place, text=text[:200] or None)


def _readable(path: Path, since_s: float | None) -> bool:
    """A small regular file that nobody has written since."""
    try:
        seen = path.stat()
        return path.is_file() and seen.st_size <= _MAX_SOURCE_BYTES and (since_s is None or seen.st_mtime <= since_s)
    except (OSError, ValueError):  # a name with a NUL
        return False
