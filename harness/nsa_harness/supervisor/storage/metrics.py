"""Reads the numbers that a program reported in its tables, its heartbeat or its output."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_harness.core.plan import Expect
from nsa_harness.core.scenario.program import Row
from nsa_harness.core.scenario.yaml_tree import value_text, visible
from nsa_harness.errors import ScenarioError
from nsa_harness.supervisor.storage.expressions import LIMIT_S, EndlessExpression, last_matches
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

_MAX_TABLE_BYTES = 16 << 20


def read_table(directory: SafeDirectory, path: Path, note: Callable[[str, str], None]) -> list[Row] | None:
    """Return the rows of a CSV file, with numbers as floats, or None. `note` gets the reason if it is unreadable."""
    if not directory.exists(path):
        return None
    try:
        text = directory.read_whole_file(path, _MAX_TABLE_BYTES).decode("utf-8", errors="replace").replace("\0", "")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        note(path.name, str(error))
        return None
    return [{name: _cell(text) for name, text in row.items() if name and text} for row in rows]


def _cell(text: str) -> float | str:
    value = _number(text)
    return text if value is None else value


def printed_metrics(attempt: AttemptDir, expect: Expect) -> dict[str, float]:
    """Map each metric in `expect` to the last number printed for it. Raise ScenarioError if a search does not end."""
    expressions = {name: metric.regex for name, metric in expect.metrics if metric.regex}
    if not expressions:
        return {}
    try:
        matches = last_matches(expressions, attempt.directory.read_tail(attempt.output))
    except EndlessExpression as error:
        name = str(error)
        expression = value_text(expressions[name])
        message = f"{expression} takes longer than {LIMIT_S:g} s on output.log; write it without nested repeats"
        location = f"{visible(str(attempt.spec))}: expect.metrics.{visible(name)}.regex"
        raise ScenarioError([f"{location}: {message}"]) from None
    values = {name: _number(text) for name, text in matches.items()}
    return {name: value for name, value in values.items() if value is not None}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def number_in(record: dict[str, Any], key: str) -> float | None:
    value = record.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def last_number(records: list[dict[str, Any]], key: str) -> float | None:
    numbers = [value for record in records if (value := number_in(record, key)) is not None]
    return numbers[-1] if numbers else None


def as_integer(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None
