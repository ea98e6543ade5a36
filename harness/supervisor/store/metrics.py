"""Numbers that the program itself reported: its training.csv, its heartbeat, what it printed."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_harness.core.evidence.looks import AttentionGate
from nsa_harness.core.plan import Expect
from nsa_harness.supervisor.store.reading import log_tail, read_whole
from nsa_harness.supervisor.store.rundir import AttemptDir

_LAST = ("grad_norm", "tokens_per_s", "peak_rss_bytes", "peak_gpu_bytes")  # the last row's
_MAX_GATES = 256
_MAX_TABLE_BYTES = 64 << 20
_MEAN = ("forward_s", "backward_s", "optimizer_s")  # over all rows


def training_metrics(attempt: AttemptDir, note: Callable[[str, str], None]) -> dict[str, float]:
    """What the program reported about its training in training.csv, by the names that `expect.metrics` takes."""
    path = attempt.path / "training.csv"
    if not path.exists():
        return {}
    try:
        table = read_whole(path, _MAX_TABLE_BYTES).decode("utf-8", errors="replace").replace("\0", "")
        rows = list(csv.DictReader(io.StringIO(table, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        note(path.name, str(error))
        return {}
    columns = {
        name: [v for row in rows if (v := _number(row.get(name))) is not None] for name in ("loss", *_LAST, *_MEAN)
    }
    found = {"loss_first": columns["loss"][:1], "loss_last": columns["loss"][-1:]}
    found |= {name: columns[name][-1:] for name in _LAST}
    found |= {name: [sum(columns[name]) / len(columns[name])] for name in _MEAN if columns[name]}
    return {"steps": float(len(rows)), **{name: values[0] for name, values in found.items() if values}}


def gates(path: Path, note: Callable[[str, str], None]) -> tuple[AttentionGate, ...]:
    """The gates of the newest step in gate_health.csv; a torn last line does not count."""
    try:
        rows = list(csv.DictReader(log_tail(path).replace("\0", "").splitlines()))
    except csv.Error as error:
        note(path.name, str(error))
        return ()
    found = [gate for row in rows if (gate := _gate(row)) is not None]
    return tuple(gate for gate in found if gate.step == max(one.step for one in found))[:_MAX_GATES]


def _gate(row: dict[str, Any]) -> AttentionGate | None:
    names = ("step", "layer", "mean", "std", "saturated_share")
    step, layer, mean, deviation, share = (_number(row.get(name)) for name in names)
    if None in (step, layer, mean, deviation, share) or not isinstance(row.get("branch"), str):
        return None
    assert step is not None
    assert layer is not None
    assert mean is not None
    assert deviation is not None
    assert share is not None
    branch = str(row["branch"])[:40]
    return AttentionGate(
        step=int(step), layer=int(layer), branch=branch, mean=mean, deviation=deviation, saturated_share=share
    )


def foreign_metrics(attempt: AttemptDir, expect: Expect) -> dict[str, float]:
    """Numbers that a foreign program prints: group 1 of the last match of each expression in output.log."""
    log = log_tail(attempt.output)
    found = {name: _matches(bound.regex, log) for name, bound in expect.metrics if bound.regex}
    values = {name: _number(matches[-1] if matches else None) for name, matches in found.items()}
    return {name: value for name, value in values.items() if value is not None}


def _matches(regex: str, log: str) -> list[str]:
    """Group 1 of every match; none for an expression that cannot be used, so that its number counts as not reported."""
    try:
        return [match[1] for match in re.finditer(regex, log)]
    except (re.error, IndexError):
        return []


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def last_number(records: list[dict[str, Any]], key: str) -> float | None:
    values = (record.get(key) for record in records)
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return numbers[-1] if numbers else None


def whole(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None
