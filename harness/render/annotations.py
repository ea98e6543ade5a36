"""Annotations as GitHub reads them from the output of a step: `::error file=,line=::` at the line to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.render import answer, words
from nsa_harness.render.text import escaped

MOST = 10  # of a step, that GitHub shows
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def github_annotations(report: Report, workspace: str) -> Iterator[str]:
    """What was not expected, worst first. `workspace`: the checkout, below which a file is named from there."""
    bad = [one for one in escaped(report).outcomes if one.final and not one.expected]
    for outcome in sorted(bad, key=words.worst_first)[:MOST]:
        facts = {**_place(outcome, workspace), "title": f"{outcome.verdict.status.value} {outcome.scenario}"}
        told = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in facts.items())
        level = "error" if outcome.verdict.status in (Status.HANG, Status.FAIL) else "warning"
        yield f"::{level} {told}::{answer.sentence(outcome.verdict.summary).translate(_DATA)}"


def _place(outcome: Outcome, workspace: str) -> dict[str, str]:
    place = outcome.culprit.place if outcome.culprit else None
    if place is None or place.file is None:
        return {}
    file = PurePath(place.file)
    name = str(file.relative_to(workspace)) if workspace and file.is_relative_to(workspace) else str(file)
    return {"file": name} if place.line is None else {"file": name, "line": str(place.line)}
