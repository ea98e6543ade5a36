"""bisect.json: a bisection for programs, schema 1, and the way back from the file to the value.

The keys of the contract come first and are always there; "detail" holds what only people and `bisect --log` need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from nsa_harness.core.bisect.question import (
    AnswerKind,
    CountsAs,
    Purpose,
    SearchAnswer,
    Spans,
    Zone,
    places_in,
    spans_of,
    within,
)
from nsa_harness.core.bisect.report import BisectReport, ProbeReport
from nsa_harness.core.bisect.subject import Form, Subject
from nsa_harness.errors import StoredRunError
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.store.adapters import adapter, mistakes
from nsa_harness.supervisor.store.rundir import RunDir

SCHEMA = 1
_MOST_BYTES = 16 << 20
PROBE = ("n", "config", "verdict", "counts_as", "dir")
DETAIL = (
    "run_id", "harness", "machine", "command", "scenario", "what", "subject", "search_probes", "wall_s", "interrupted",
    "notes", "not_covered",
)  # fmt: skip


def bisect_json(report: BisectReport) -> str:
    return json.dumps(_values(escaped(report)), indent=1, allow_nan=False) + "\n"


def from_json(text: str, where: str = "bisect.json") -> BisectReport:
    """The bisection a file holds. Raises StoredRunError, which names every value that is wrong."""
    try:
        stored = json.loads(text)
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            raise _unreadable(where, [f'"schema": {SCHEMA} is what this harness reads'])
        flat = _flat(stored)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, [f"not JSON, or cut short: {error}"]) from None
    except (KeyError, TypeError) as error:
        raise _unreadable(where, [f"not as written: {type(error).__name__}: {error}"]) from None
    try:
        stored_report = adapter(Stored).validate_json(json.dumps(flat), strict=True)
    except ValidationError as error:
        raise _unreadable(where, mistakes(error)) from None
    if strays := list(_strays(stored_report)):
        raise _unreadable(where, strays)
    return _report(stored_report)


def stored_search(run: RunDir) -> BisectReport:
    """The bisection whose run this is. Raises StoredRunError; `run.search` tells whether it is one at all."""
    try:
        text = run.door.whole(run.search, _MOST_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        why = f"{error.strerror}; a bisection that was cut short goes on by its command"
        raise StoredRunError(f"{run.path} holds no {run.search.name}: {why}") from None
    except ValueError as error:
        raise _unreadable(str(run.search), [str(error)]) from None
    return from_json(text, str(run.search))


def probe_event(subject: Subject, probe: ProbeReport) -> dict[str, object]:
    """One probe in the `--json` stream, by the keys of bisect.json."""
    values = _probe(subject, escaped(probe))
    return {"event": "probe", "scenario": values["dir"], **{key: values[key] for key in PROBE}}


def answer_event(report: BisectReport, run_dir: str) -> dict[str, object]:
    """The end of the `--json` stream of a bisection."""
    report = escaped(report)
    return {"event": "done", "scenario": report.scenario, "answer": _answer(report), "run_dir": escape(run_dir)}


def answer_items(subject: Subject, answer: SearchAnswer) -> list[Any]:
    """The answer as programs read it: layer numbers, a half-open range, values, names."""
    if not answer.items:
        return []
    match answer.kind:
        case AnswerKind.COUNT:
            return [answer.items[0]]
        case AnswerKind.THRESHOLD:
            return [subject.items[answer.items[0] - 1] if subject.ordered else answer.items[0]]
        case AnswerKind.RANGE:
            places = range(*answer.items)
            if subject.form is Form.LAYERS:
                return [subject.items[places[0]], int(str(subject.items[places[-1]])) + 1]
            return [subject.items[place] for place in places]
    return [subject.items[place] for place in answer.items]


@dataclass(frozen=True, kw_only=True)
class _StoredSubject:
    """A subject without its values, which may be anything that JSON can say: pydantic knows no such type."""

    form: Form
    key: str
    noun: str
    items: tuple[Any, ...]
    good: Any
    bad_values: tuple[Any, ...]
    good_values: tuple[Any, ...]
    open_end: bool
    together: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _StoredAnswer:
    """An answer with its sets as spans."""

    kind: AnswerKind
    items: tuple[int, ...]
    groups: tuple[Spans, ...]
    confidence: float
    p_bad: float | None
    why: str
    open: Spans
    passing: Spans | None
    failing: Spans | None
    zones: tuple[Zone, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stored(BisectReport):
    """What the file holds, checked."""

    subject: _StoredSubject  # type: ignore[assignment]  # `_report` makes them what a report holds
    answer: _StoredAnswer  # type: ignore[assignment]


def _report(stored: Stored) -> BisectReport:
    subject, answer = Subject(**vars(stored.subject)), stored.answer
    in_places = SearchAnswer(
        **{
            **vars(answer),
            "groups": tuple(map(places_in, answer.groups)),
            "open": tuple(sorted(places_in(answer.open))),
            "passing": None if answer.passing is None else places_in(answer.passing),
            "failing": None if answer.failing is None else places_in(answer.failing),
        }
    )
    return BisectReport(**{**vars(stored), "subject": subject, "answer": in_places})


def _strays(stored: Stored) -> Iterator[str]:
    """Places that no item has: whoever reads on would count up to them."""
    items, answer = len(stored.subject.items), stored.answer
    spans = {"open": answer.open, "passing": answer.passing or (), "failing": answer.failing or ()}
    named = [(f"detail.answer.{name}", value) for name, value in spans.items()]
    named += [(f"detail.answer.groups.{number}", group) for number, group in enumerate(answer.groups)]
    named += [(f"probes.{number}.subset", probe.subset) for number, probe in enumerate(stored.probes)]
    yield from (f"{name}: no spans of {items} items" for name, value in named if not within(value, items))
    for number, probe in enumerate(stored.probes):
        if not 0 <= probe.open[0] <= probe.open[1] <= items:
            yield f"probes.{number}.open: not within {items} items"
    if any(not 0 <= item <= items for item in answer.items):
        yield f"detail.answer.items: not within {items} items"


def _values(report: BisectReport) -> dict[str, Any]:
    values = asdict(report)
    return {
        "schema": SCHEMA,
        "question": report.subject.question,
        "outcome_sought": values["signature"],
        "answer": _answer(report),
        "controls": {"good": _control(report, Purpose.CONTROL_GOOD), "bad": _control(report, Purpose.CONTROL_BAD)},
        "probes": [_probe(report.subject, probe) for probe in report.probes],
        "floor_probes": report.floor_probes,
        "commands": values["commands"],
        "detail": {
            **{key: values[key] for key in DETAIL},
            "answer": _stored_answer(report.answer),
        },
    }


def _stored_answer(answer: SearchAnswer) -> dict[str, Any]:
    """The answer in places of the subject's items, sets of them as spans."""
    return {
        **vars(answer),
        "groups": [spans_of(group) for group in answer.groups],
        "open": spans_of(answer.open),
        "passing": None if answer.passing is None else spans_of(answer.passing),
        "failing": None if answer.failing is None else spans_of(answer.failing),
        "zones": [asdict(zone) for zone in answer.zones],
    }


def _answer(report: BisectReport) -> dict[str, Any]:
    answer = report.answer
    flaky = {} if answer.p_bad is None else {"p_hang": answer.p_bad}
    return {
        "kind": answer.kind.value,
        "items": answer_items(report.subject, answer),
        "confidence": answer.confidence,
        **flaky,
    }


def _control(report: BisectReport, purpose: Purpose) -> str | None:
    """The directory of the last one that ended as it should; of one that did not, null."""
    wanted = CountsAs.GOOD if purpose is Purpose.CONTROL_GOOD else CountsAs.BAD
    # Up to an open end it is a step on the way that fails first.
    purposes = (purpose, Purpose.GALLOP) if wanted is CountsAs.BAD else (purpose,)
    dirs = [probe.dir for probe in report.probes if probe.purpose in purposes and probe.counts_as is wanted]
    return dirs[-1] if dirs else None


def _probe(subject: Subject, probe: ProbeReport) -> dict[str, Any]:
    values = {**asdict(probe), "config": escaped(dict(subject.config(probe.places)))}
    return {**{key: values.pop(key) for key in PROBE}, **values}


def _flat(stored: dict[str, Any]) -> dict[str, Any]:
    detail = stored["detail"]
    known = {key: detail[key] for key in (*DETAIL, "answer")}
    taken = {key: stored[key] for key in ("probes", "floor_probes", "commands")}
    return {**known, **taken, "signature": stored["outcome_sought"]}


def _unreadable(where: str, found: list[str]) -> StoredRunError:
    lines = "\n".join(f"  {escape(mistake)}" for mistake in found)
    return StoredRunError(
        f"{escape(where)} cannot be read as a bisection:\n{lines}\n"
        "Give the command of the bisection again, or name another run: nsa-harness bisect --log RUN"
    )
