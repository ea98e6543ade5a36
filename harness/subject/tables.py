"""What nsa.train tells of itself in its own tables: numbers of its training, gates of its attention, cost of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from nsa_harness.core.diagnosis.case import Case, Explanation, counted, explained
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.grades import Seen
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.report import Place
from nsa_harness.core.scenario.program import Row, Table

_LAST = ("grad_norm", "tokens_per_s", "peak_rss_bytes", "peak_gpu_bytes")  # the last row's
_MEAN = ("forward_s", "backward_s", "optimizer_s")  # over all rows
_RATES = ("seconds", "tokens_per_s")
_MAX_GATES = 256
_MAX_PARTS = 64
_OF_A_GATE = ("step", "layer", "mean", "std", "saturated_share")
_SHUT, _SATURATED = 0.01, 0.99


def reported(table: Table) -> tuple[dict[str, float], tuple[Row, ...]]:
    """Its metrics, by the names that `expect.metrics` takes, and the rows that the rules below read."""
    return _metrics(table), (*_gates(table), *_step_cost(table))


def _metrics(table: Table) -> dict[str, float]:
    rows = table("training.csv")
    if rows is None:
        return {}
    columns = {
        name: [value for row in rows if isinstance(value := row.get(name), float)] for name in ("loss", *_LAST, *_MEAN)
    }
    found = {"loss_first": columns["loss"][:1], "loss_last": columns["loss"][-1:]}
    found |= {name: columns[name][-1:] for name in _LAST}
    found |= {name: [sum(columns[name]) / len(columns[name])] for name in _MEAN if columns[name]}
    found |= _of_steps(rows)
    return {"steps": float(len(rows)), **{name: values[0] for name, values in found.items() if values}}


def _of_steps(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Of the steps after the first, which warms up; of a single one that one."""
    after = rows[1:] or rows
    seconds, rates = ([value for row in after if isinstance(value := row.get(name), float)] for name in _RATES)
    return {
        "step_s_median": [median(seconds)] if seconds else [],
        "tokens_per_s_median": [median(rates)] if rates else [],
        "tokens_per_s_slowest": [min(rates)] if rates else [],
    }


def _gates(table: Table) -> tuple[Row, ...]:
    """One for each branch and layer, as the newest step had them; a torn last line does not count."""
    whole = [row for row in table("gate_health.csv") or () if isinstance(row.get("branch"), str) and _is_of_a_gate(row)]
    newest = max((float(row["step"]) for row in whole), default=None)
    kept = [row for row in whole if row["step"] == newest][:_MAX_GATES]
    return tuple({name: row[name] for name in _OF_A_GATE} | {"branch": str(row["branch"])[:40]} for row in kept)


def _is_of_a_gate(row: Row) -> bool:
    numbers = [row.get(name) for name in _OF_A_GATE]
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)


_SIZES = ("batch", "seq_len", "layers")
_COUNTED = ("nodes", "saved_bytes", "square_bytes", "expected_bytes", "begin_bytes", "peak_bytes")


def _step_cost(table: Table) -> Iterator[Row]:
    """One: what a step was seen to cost, with the size that it had and who computed it."""
    rows = [row for row in table("step_cost.csv") or () if all(_is_number(row.get(name)) for name in _SIZES)]
    if not rows:
        return
    cost: Row = {"step_cost": "of the first step", **{name: rows[0][name] for name in _SIZES}}
    for name in _COUNTED:
        values = [value for row in rows if isinstance(value := row.get(name), float) and math.isfinite(value)]
        cost |= {name: max(values)} if values else {}
    yield cost | _implementations(table) | _time(table)


def _implementations(table: Table) -> Row:
    """Those that compute; of one that was chosen for its length also where that ends."""
    rows = [row for row in table("fallback_counters.csv") or () if "implementation" in row][:_MAX_PARTS]
    named = sorted({f"{row['part']} {row['implementation']}"[:40] for row in rows if "part" in row})
    ends = [value for row in rows if isinstance(value := row.get("until_tokens"), float)]
    return {"implementations": ", ".join(named)} | ({"until_tokens": min(ends)} if ends else {})


def _time(table: Table) -> Row:
    """The median of the steps after the first, which is none like the others, and how sure it is.

    The standard error of a median is 1.25 times that of a mean; the spread comes from the quartiles, which a step that
    was held up does not move.
    """
    rows = table("training.csv") or ()
    seconds = sorted(value for row in rows[1:] if isinstance(value := row.get("seconds"), float) and value > 0)
    if not seconds:
        return {}
    middle = median(seconds)
    low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.25, 0.75))
    error = 1.2533 * (high - low) / 1.349 / math.sqrt(len(seconds)) / middle
    return {"seconds": middle, "error": error, "steps": float(len(seconds))}


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 1


@rule(RulePhase.SILENT, Cause.GATE_COLLAPSE, outranks=("dirty_exit",), outranked_by=("memory_growth",))
def gate_collapse(case: Case) -> Explanation | None:
    """A branch whose gate is shut for practically every token."""
    shut = [
        gate
        for gate in case.evidence.reported
        if "branch" in gate and float(gate["mean"]) <= _SHUT and float(gate["saturated_share"]) >= _SATURATED
    ]
    if not shut:
        return None
    first = min(shut, key=lambda gate: (gate["layer"], gate["branch"]))
    layer = int(first["layer"])
    return explained(
        Cause.GATE_COLLAPSE,
        f"{counted(len(shut), 'gate')} shut for every token in step {int(first['step'])}: first branch"
        f" {first['branch']} of layer {layer}, mean {float(first['mean']):.2g}",
        place=Place(layer=layer, module=f"blocks.{layer}.attn"),
        seen=Seen.PART,
        proof=("gate_health.csv",),
    )


RULES = (gate_collapse,)
