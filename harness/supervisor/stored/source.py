"""The statement at a place: read once, while the file is still the one that ran."""

from __future__ import annotations

import linecache
from dataclasses import replace
from pathlib import Path

from harness.core.place import Place
from harness.core.report import Outcome

_MAX_SOURCE_BYTES = 4 << 20


def quoted(outcome: Outcome) -> Outcome:
    """The outcome with the statement at every place it names."""
    culprit = outcome.culprit
    if culprit is not None:
        culprit = replace(culprit, place=_with_text(culprit.place))
    findings = tuple(replace(finding, place=_with_text(finding.place)) for finding in outcome.findings)
    return replace(outcome, culprit=culprit, findings=findings)


def _with_text(place: Place | None) -> Place | None:
    if place is None or place.file is None or place.line is None or not _readable(Path(place.file)):
        return place
    text = linecache.getline(place.file, place.line).strip()
    return replace(place, text=text[:200] or None)


def _readable(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _MAX_SOURCE_BYTES
    except OSError:
        return False
