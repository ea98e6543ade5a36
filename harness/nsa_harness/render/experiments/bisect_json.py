"""The file bisect.json (schema 1): its types, its writer and its reader.

The keys that programs may rely on come first and are always present. The keys under "detail" are needed only by people
and by `nsa-harness bisect --log`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from nsa_harness.core.experiment.trial import Signature
from nsa_harness.core.search.question import (
    AnswerKind,
    ProbeResult,
    Purpose,
    SearchAnswer,
    Spans,
    Subset,
    are_valid_spans,
    indices_in,
    spans_of,
)
from nsa_harness.core.search.report import BisectReport, Commands, ProbeReport, SearchDetail
from nsa_harness.core.search.subject import Subject, SubjectForm
from nsa_harness.errors import StoredRunError
from nsa_harness.render.experiments.words import open_indices
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.storage.adapters import error_texts, type_adapter
from nsa_harness.supervisor.storage.rundir import RunDir

SCHEMA: Literal[1] = 1
_MAX_BYTES = 16 << 20
T = TypeVar("T")


def _check_spans(value: Spans, info: ValidationInfo) -> Spans:
    """Return `value`, or raise an error if a span is out of range, because it could use up the memory."""
    if not are_valid_spans(value, items := _item_count(info)):
        raise PydanticCustomError("places", "not valid ranges of {items} items", {"items": items})
    return value


def _parse_indices(value: Any, info: ValidationInfo) -> Subset:
    return indices_in(_check_spans(type_adapter(Spans).validate_python(value), info))


def _check_bounds(value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    items = _item_count(info)
    if not all(0 <= place <= items for place in value):
        raise PydanticCustomError("places", "not within {items} items", {"items": items})
    return value


def _item_count(info: ValidationInfo) -> int:
    assert info.context is not None
    return int(info.context["items"])


# Sets of places are written as spans.
IndexSpans = Annotated[Subset, PlainValidator(_parse_indices), PlainSerializer(spans_of, return_type=Spans)]
SortedIndices = Annotated[
    tuple[int, ...],
    PlainValidator(lambda value, info: tuple(sorted(_parse_indices(value, info)))),
    PlainSerializer(spans_of, return_type=Spans),
]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ProbeEvent:
    """The part of the record of a test run that programs can rely on."""

    n: int
    config: dict[str, Any]
    verdict: str | None
    counts_as: ProbeResult
    dir: str | None


@dataclass(frozen=True, kw_only=True)
class StoredProbe(ProbeReport, ProbeEvent):
    """A test run (a probe) in a bisection, as stored in bisect.json."""

    subset: Annotated[Spans, AfterValidator(_check_spans)]
    open: Annotated[tuple[int, int], AfterValidator(_check_bounds)]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The known part of an undecided answer: the items that pass, those that fail, and those still open.

    Each field lists items in the same format as `items` of the answer.
    """

    passing: tuple[Any, ...] | None  # the largest set that passed; None: no set passed
    failing: tuple[Any, ...] | None  # the smallest set that failed; None: no set failed
    open: tuple[Any, ...]  # the items that may still belong to the answer
    known: tuple[Any, ...]  # the items without which `failing` passes


@dataclass(frozen=True, kw_only=True)
class AnswerEntry:
    """The answer of a bisection, in the format meant for programs."""

    kind: AnswerKind
    items: tuple[Any, ...]
    confidence: Share
    p_hang: Share | None = None  # the failure rate; the key is omitted if the program is not flaky
    bounds: Bounds | None = None


@dataclass(frozen=True, kw_only=True)
class ControlDirectories:
    """The directories of the runs that confirmed the known-good and the known-bad configuration."""

    good: str | None
    bad: str | None


@dataclass(frozen=True, kw_only=True)
class StoredSubject(Subject):
    """The items that a bisection varies, as stored in bisect.json.

    Its values have the type Any because they may be any JSON value, and pydantic has no strict type for that.
    """

    items: tuple[Any, ...]
    good: Any = None
    bad_values: tuple[Any, ...] = ()
    good_values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoredAnswer(SearchAnswer):
    """The answer of a bisection, as stored in bisect.json.

    It refers to items of the subject by index and writes a set of indices as spans.
    """

    items: Annotated[tuple[int, ...], AfterValidator(_check_bounds)] = ()
    groups: tuple[IndexSpans, ...] = ()
    open: SortedIndices = ()
    known: SortedIndices = ()
    passing: IndexSpans | None = None
    failing: IndexSpans | None = None


@dataclass(frozen=True, kw_only=True)
class StoredDetail(SearchDetail):
    """The contents of the key "detail" in bisect.json."""

    subject: StoredSubject
    answer: StoredAnswer


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """The contents of bisect.json."""

    schema: Literal[1]
    question: str
    outcome_sought: Signature | None
    answer: AnswerEntry
    controls: ControlDirectories
    probes: tuple[StoredProbe, ...]
    floor_probes: int
    commands: Commands
    detail: StoredDetail


def bisect_json(report: BisectReport) -> str:
    values = type_adapter(SearchRecord).dump_python(_record(escaped(report)), mode="json")
    return json.dumps({**values, "answer": _without_null_rate(values["answer"])}, indent=1, allow_nan=False) + "\n"


def from_json(text: str, where: str = "bisect.json") -> BisectReport:
    """Parse bisect.json. Raise StoredRunError, which names the file as `where`, if it is invalid."""
    try:
        items = len(json.loads(text)["detail"]["subject"]["items"])
        record = type_adapter(SearchRecord).validate_json(text, strict=True, context={"items": items})
    except ValidationError as error:
        raise _unreadable(where, error_texts(error)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, [f"not JSON, or cut short: {error}"]) from None
    except (KeyError, TypeError) as error:
        raise _unreadable(where, [f"unexpected content: {type(error).__name__}: {error}"]) from None
    return _report(record)


def stored_search(run: RunDir) -> BisectReport:
    """Return the bisection stored in a run directory. Raise StoredRunError if there is none."""
    try:
        text = run.directory.read_whole_file(run.search, _MAX_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        why = f"{error.strerror}; to continue an interrupted bisection, give its command again"
        raise StoredRunError(f"{run.path} has no {run.search.name}: {why}") from None
    except ValueError as error:
        raise _unreadable(str(run.search), [str(error)]) from None
    return from_json(text, str(run.search))


def probe_event(subject: Subject, probe: ProbeReport) -> dict[str, object]:
    """Return the `probe` event of the `--json` stream for a finished test run."""
    stored = _stored_probe(subject, escaped(probe))
    values = type_adapter(ProbeEvent).dump_python(_as_base_type(ProbeEvent, stored), mode="json")
    return {"event": "probe", "scenario": stored.dir, **values}


def answer_event(report: BisectReport, run_dir: str) -> dict[str, object]:
    """Return the `done` event of the `--json` stream, which contains the answer."""
    report = escaped(report)
    answer = _without_null_rate(type_adapter(AnswerEntry).dump_python(_answer(report), mode="json"))
    return {"event": "done", "scenario": report.scenario, "answer": answer, "run_dir": escape(run_dir)}


def answer_items(subject: Subject, answer: SearchAnswer) -> list[Any]:
    """Return, as JSON values, the items that an answer names.

    They are the items themselves (layer numbers, values or names), start and stop for a range of layers, and a single
    number for an answer of the kind COUNT.
    """
    if not answer.items:
        return []
    match answer.kind:
        case AnswerKind.COUNT:
            return [answer.items[0]]
        case AnswerKind.THRESHOLD:
            return [subject.items[answer.items[0] - 1] if subject.ordered else answer.items[0]]
        case AnswerKind.RANGE:
            places = range(*answer.items)
            if subject.form is SubjectForm.LAYERS:
                return [subject.items[places[0]], int(str(subject.items[places[-1]])) + 1]
            return [subject.items[place] for place in places]
    return [subject.items[place] for place in answer.items]


def _record(report: BisectReport) -> SearchRecord:
    detail = {field.name: getattr(report, field.name) for field in fields(SearchDetail)}
    subject, answer = StoredSubject(**vars(report.subject)), StoredAnswer(**vars(report.answer))
    return SearchRecord(
        schema=SCHEMA,
        question=report.subject.question,
        outcome_sought=report.signature,
        answer=_answer(report),
        controls=ControlDirectories(
            good=_control(report, Purpose.CONTROL_GOOD), bad=_control(report, Purpose.CONTROL_BAD)
        ),
        probes=tuple(_stored_probe(report.subject, probe) for probe in report.probes),
        floor_probes=report.floor_probes,
        commands=report.commands,
        detail=StoredDetail(**{**detail, "subject": subject, "answer": answer}),
    )


def _report(record: SearchRecord) -> BisectReport:
    detail = record.detail
    return BisectReport(
        **{
            **vars(detail),
            "subject": _as_base_type(Subject, detail.subject),
            "answer": _as_base_type(SearchAnswer, detail.answer),
            "signature": record.outcome_sought,
            "probes": tuple(_as_base_type(ProbeReport, probe) for probe in record.probes),
            "commands": record.commands,
            "floor_probes": record.floor_probes,
        }
    )


def _as_base_type(of: type[T], value: T) -> T:
    """Return a copy of `value` with the type `of`, which is a base class of the value's own type."""
    return of(**{field.name: getattr(value, field.name) for field in fields(of)})  # type: ignore[arg-type]


def _answer(report: BisectReport) -> AnswerEntry:
    subject, answer = report.subject, report.answer
    return AnswerEntry(
        kind=answer.kind,
        items=tuple(answer_items(subject, answer)),
        confidence=answer.confidence,
        p_hang=answer.p_bad,
        bounds=_bounds(report) if answer.kind is AnswerKind.UNDECIDED else None,
    )


def _bounds(report: BisectReport) -> Bounds:
    """Return what is known about an undecided answer: the items that pass, that fail and that are still open."""
    answer, subject, open_ = report.answer, report.subject, sorted(open_indices(report))
    good = [probe.indices for probe in report.probes if probe.counts_as is ProbeResult.GOOD]
    bad = [probe.indices for probe in report.probes if probe.counts_as is ProbeResult.BAD]
    passing = answer.passing if answer.passing is not None else max(good, key=len, default=None)
    failing = answer.failing if answer.failing is not None else min(bad, key=len, default=None)
    return Bounds(
        passing=None if passing is None else _items_of(subject, passing),
        failing=None if failing is None else _items_of(subject, failing),
        open=tuple(subject.items[place] for place in (sorted({*open_[:1], *open_[-1:]}) if subject.ordered else open_)),
        known=tuple(subject.items[place] for place in answer.known),
    )


def _items_of(subject: Subject, places: Subset) -> tuple[Any, ...]:
    """Return the items at `places`, or for an ordered subject only the largest one or the known-good value."""
    if subject.ordered:
        return (subject.items[max(places)] if places else subject.good,)
    return tuple(subject.items[place] for place in sorted(places))


def _without_null_rate(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "p_hang" or value is not None}


def _stored_probe(subject: Subject, probe: ProbeReport) -> StoredProbe:
    return StoredProbe(**vars(probe), config=escaped(dict(subject.config(probe.indices))))


def _control(report: BisectReport, purpose: Purpose) -> str | None:
    """Return the directory of the last control run for `purpose` that ended as expected, or None if there is none."""
    expected_result = ProbeResult.GOOD if purpose is Purpose.CONTROL_GOOD else ProbeResult.BAD
    # If no failing value was known, the first failing probe is one with the purpose GALLOP.
    purposes = (purpose, Purpose.GALLOP) if expected_result is ProbeResult.BAD else (purpose,)
    dirs = [probe.dir for probe in report.probes if probe.purpose in purposes and probe.counts_as is expected_result]
    return dirs[-1] if dirs else None


def _unreadable(where: str, mistake_texts: list[str]) -> StoredRunError:
    lines = "\n".join(f"  {escape(mistake)}" for mistake in mistake_texts)
    return StoredRunError(
        f"{escape(where)} cannot be read as a bisection:\n{lines}\n"
        "Give the command of the bisection again, or name another run: nsa-harness bisect --log RUN"
    )
