"""The file why.json (schema 1), also stored as "detail.why" of report.json: its types, its writer and its reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import ValidationError

from nsa_harness.core.experiment.why import FirstAnswer, WhyReport, WhyResult, WhyRun
from nsa_harness.core.recording.explanation import Explanation
from nsa_harness.core.report import doc
from nsa_harness.errors import StoredRunError
from nsa_harness.render.experiments import why as shown
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.storage.adapters import error_texts, type_adapter
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.texts import why as texts

SCHEMA: Literal[1] = 1
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class WhyDetail:
    """The contents of the key "detail" in why.json, which are meant for people rather than programs."""

    scenario: str
    directory: Annotated[str, doc("the directory in which the program ran")]
    max_runs: Annotated[int, doc("at most so many runs are launched")]
    budget_s: Annotated[float | None, doc("no new run starts after this many seconds; null: no limit")]
    values: Annotated[bool, doc("whether values were recorded, not only statements")]
    experiments: Annotated[bool, doc("whether the answer was to be tested by experiments")]
    passed_before: Annotated[int, doc("attempts of the failed launch that passed in the same run")]
    interrupted: Annotated[bool, doc("whether Ctrl-C or a signal ended the command early")]
    notes: Annotated[tuple[str, ...], doc("choices that nsa-harness made")]


@dataclass(frozen=True, kw_only=True)
class WhyRecord:
    """The contents of why.json: why the ranks of a failed run took different ways."""

    schema: Literal[1]
    result: Annotated[WhyResult, doc("the kind of answer; certain only after an experiment on the origin")]
    claim: Annotated[str, doc("the answer, from the origin to the effect")]
    advice: Annotated[str, doc("what to change; or empty")]
    origin: Annotated[int | None, doc("index, in the candidates, of the line that counts as the origin; or null")]
    dropped: Annotated[tuple[int, ...], doc("indices of the candidates that an experiment excluded")]
    first: Annotated[FirstAnswer, doc("the failed run that is explained, and the answer of that run")]
    explanation: Annotated[Explanation | None, doc("what the recorded run shows; null: it was not finished")]
    runs: Annotated[tuple[WhyRun, ...], doc("the launched runs, in order")]
    detail: Annotated[WhyDetail, doc("for people; its keys may change without a new schema")]


def record_of(report: WhyReport) -> WhyRecord:
    """Return the answer of `why` in the form in which it is stored."""
    report = escaped(report)
    explanation, origin = report.explanation, report.origin
    claim, advice = " ".join(shown.not_answered_texts(report)), report.first.advice
    if report.has_origin and explanation is not None and origin is not None:
        namer = texts.namer_of(texts.places_of(explanation))
        claim = " ".join(texts.sentences(explanation, origin, namer))
        advice = texts.remedy(origin, namer)
    detail = {field.name: getattr(report, field.name) for field in fields(WhyDetail)}
    return WhyRecord(
        schema=SCHEMA, result=report.result, claim=claim, advice=advice, first=report.first,
        origin=explanation.candidates.index(origin) if explanation is not None and origin is not None else None,
        dropped=tuple(sorted(report.dropped)), explanation=explanation, runs=report.runs, detail=WhyDetail(**detail),
    )  # fmt: skip


def why_values(report: WhyReport) -> dict[str, Any]:
    """Return the answer of `why` as a JSON object."""
    values: dict[str, Any] = type_adapter(WhyRecord).dump_python(record_of(report), mode="json")
    return values


def why_json(report: WhyReport) -> str:
    """Return the contents of why.json."""
    return json.dumps(why_values(report), indent=1, allow_nan=False) + "\n"


def from_json(text: str, where: str = "why.json") -> WhyReport:
    """Parse the contents of a why.json file. Raise StoredRunError if they are invalid.

    `where`: the name of the file, for error messages.
    """
    try:
        record = type_adapter(WhyRecord).validate_json(text, strict=True)
    except ValidationError as error:
        lines = "\n".join(f"  {escape(mistake)}" for mistake in error_texts(error))
        raise StoredRunError(f"{escape(where)} cannot be read as an answer of `why`:\n{lines}") from None
    candidates = len(record.explanation.candidates) if record.explanation else 0
    if any(run.candidate is not None and not 0 <= run.candidate < candidates for run in record.runs):
        raise StoredRunError(f"{escape(where)}: a run names a candidate that does not exist")
    return WhyReport(
        **vars(record.detail), first=record.first, result=record.result, explanation=record.explanation,
        runs=record.runs,
    )  # fmt: skip


def stored_why(run: RunDir) -> WhyReport | None:
    """Return the answer of `why` that is stored in a run directory, or None if this is no run of `why`.

    Raise StoredRunError if it is invalid.
    """
    if not run.directory.is_file(run.why):
        return None
    try:
        text = run.directory.read_whole_file(run.why, _MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise StoredRunError(f"{run.why} cannot be read: {error}") from None
    return from_json(text, str(run.why))
