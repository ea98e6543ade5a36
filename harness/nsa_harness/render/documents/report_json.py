"""report.json: the report for programs, schema 1, and the way back from the file to the value.

The keys of the contract are always there, null when unknown. What only people need lies under "detail", where a number
that JSON cannot say is the text "nan", "inf" or "-inf"; in the contract it is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from nsa_harness.core.comparison.decisions import Playbook, fitting
from nsa_harness.core.comparison.hypotheses import HypothesisRow, Side, answers
from nsa_harness.core.report import Artifact, Outcome, Report, Walk
from nsa_harness.errors import StoredRunError
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.storage.adapters import adapter, mistakes

SCHEMA = 1

OUTCOME_DETAIL = (
    "about",
    "subject",
    "ranks",
    "backend",
    "notes",
    "checked",
    "not_covered",
    "ruled_out",
    "standings",
    "vitals",
    "metrics",
    "artifacts",
    "why",
    "ended",
    "repeat",
    "next",
    "device",
    "tags",
    "settings",
    "chosen",
    "criteria",
    "missing_gradients",
    "last_agreed",
    "deepening",
    "showed",
    "stacks",
    "divergence",
    "cost",
    "memory",
    "signals",
    "nccl",
)
_DERIVED = ("hypotheses",)  # below detail of the report: what its outcomes say together
REPORT_DETAIL = ("command", "interrupted", "not_run", "files", "tree")


def to_json(report: Report, playbook: Playbook | None = None) -> str:
    """`playbook`: what is asked of the runs of our program; what they answer is written beside them."""
    report = escaped(report)
    values = _report(report)
    if playbook:
        asked = fitting(playbook, report.outcomes).hypotheses
        values["detail"]["hypotheses"] = [_hypothesis(row) for row in answers(report.outcomes, asked)]
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """One outcome as report.json and the event stream hold it."""
    outcome = escaped(outcome)
    values = asdict(outcome)
    detail = {key: values.pop(key) for key in OUTCOME_DETAIL}
    verdict = values.pop("verdict")
    texts = {
        "culprit": _take_text(values["culprit"]),
        "findings": [_take_text(finding) for finding in values["findings"]],
    }
    contract = {
        **{key: values.pop(key) for key in ("scenario", "spec_hash", "attempt", "final")},
        "verdict": verdict["status"],
        **{key: verdict[key] for key in ("kind", "cause", "summary")},
        **values,
    }
    return {**_plain(contract, finite=True), "detail": _plain({**detail, "place_text": texts}, finite=False)}


def from_json(text: str, where: str = "report.json") -> Report:
    """The report a file holds. Raises StoredRunError, which names every value that is wrong."""
    try:
        stored = json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, [f"not JSON, or cut short: {error}"]) from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        found = stored.get("schema") if isinstance(stored, dict) else type(stored).__name__
        raise _unreadable(where, [f'schema: expected {SCHEMA}, got {found!r}; this harness reads "schema": {SCHEMA}'])
    try:
        # Through JSON once more: pydantic's strict mode takes lists for tuples and names for enums only from there.
        return adapter(Report).validate_json(json.dumps(_flat_report(stored)), strict=True)
    except ValidationError as error:
        raise _unreadable(where, mistakes(error)) from None
    except (_WrongShapeError, RecursionError) as error:
        raise _unreadable(where, [str(error)]) from None


class _WrongShapeError(Exception):
    """A value that is no object where one must be."""


def _report(report: Report) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": report.run_id,
        "harness": report.harness,
        "machine": _plain(asdict(report.machine), finite=True),
        "outcomes": [outcome_values(outcome) for outcome in report.outcomes],
        "gates": [_plain(asdict(gate), finite=True) for gate in report.gates],
        "detail": {key: _detail(getattr(report, key)) for key in REPORT_DETAIL},
    }


def _detail(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(asdict(one), finite=False) if isinstance(one, Artifact) else one for one in value]
    return _plain(asdict(value), finite=False) if isinstance(value, Walk) else value


def _hypothesis(row: HypothesisRow) -> dict[str, Any]:
    return {
        "text": row.hypothesis.text,
        "answer": row.answer.value,
        "because": row.reason,
        "control": _side(row.control),
        "changed": _side(row.changed),
        "command": row.command,
    }


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {"scenario": side.run.scenario, "bad": side.ended.bad, "of": side.ended.of}


def _take_text(holder: dict[str, Any] | None) -> str | None:
    """Move the statement of a place out of the contract."""
    place = holder["place"] if holder else None
    text: str | None = place.pop("text") if place else None
    return text


def _plain(value: Any, *, finite: bool) -> Any:
    match value:
        case dict():
            return {str(key): _plain(item, finite=finite) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, finite=finite) for item in value]
        case float() if not math.isfinite(value):
            return None if finite else str(value)
    return value


def _flat_report(stored: dict[str, Any]) -> dict[str, Any]:
    outcomes = stored.get("outcomes")
    if not isinstance(outcomes, list):
        raise _WrongShapeError("outcomes: expected a list")
    flat = {key: value for key, value in stored.items() if key not in ("schema", "detail")}
    flat["outcomes"] = [_flat_outcome(item, f"outcomes.{number}") for number, item in enumerate(outcomes)]
    detail = _object(stored.get("detail"), "detail")
    return {**flat, **{key: value for key, value in detail.items() if key not in _DERIVED}}


def _flat_outcome(stored: object, where: str) -> dict[str, Any]:
    flat = dict(_object(stored, where))
    detail = dict(_object(flat.pop("detail", None), f"{where}.detail"))
    texts = _object(detail.pop("place_text", None), f"{where}.detail.place_text")
    verdict = {key: flat.pop(key, None) for key in ("kind", "cause", "summary")}
    verdict["status"] = flat.pop("verdict", None)
    findings, statements = flat.get("findings"), texts.get("findings")
    if not isinstance(findings, list) or not isinstance(statements, list) or len(findings) != len(statements):
        raise _WrongShapeError(f"{where}.findings: expected a list as long as detail.place_text.findings")
    places = {
        "culprit": _with_text(flat.get("culprit"), texts.get("culprit")),
        "findings": [_with_text(*pair) for pair in zip(findings, statements, strict=True)],
    }
    return {**flat, "verdict": verdict, **_revived(detail), **places}


def _revived(detail: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot say, back from their names; anything else is left for the validation to judge."""
    metrics, vitals = detail.get("metrics"), detail.get("vitals")
    if isinstance(metrics, dict):
        detail = {**detail, "metrics": {name: _number(value) for name, value in metrics.items()}}
    if isinstance(vitals, list):
        rows = [{**row, "loss": _number(row.get("loss"))} if isinstance(row, dict) else row for row in vitals]
        detail = {**detail, "vitals": rows}
    return detail


def _number(value: object) -> object:
    return float(value) if value in ("nan", "inf", "-inf") and isinstance(value, str) else value


def _finite_number(text: str) -> float:
    """Python reads NaN, and 1e999 as infinity; no report holds either."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _with_text(holder: Any, text: object) -> Any:
    if not isinstance(holder, dict) or not isinstance(holder.get("place"), dict):
        return holder
    return {**holder, "place": {**holder["place"], "text": text}}


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongShapeError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _unreadable(where: str, found: Iterable[str]) -> StoredRunError:
    lines = "\n".join(f"  {escape(mistake)}" for mistake in found)
    return StoredRunError(
        f"{escape(where)} cannot be read as a report:\n{lines}\n"
        "Repeat the run, or name another run directory: nsa-harness report RUN"
    )
