"""Read the tables written by nsa.train, and diagnose failures from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.report import Place
from nsa_harness.core.scenario.program import Row, Table
from nsa_harness.subject.files import SHARDED

_LAST = ("grad_norm", "tokens_per_s", "peak_rss_bytes", "peak_gpu_bytes")  # values of the last row are reported
_MEAN = ("fetch_s", "forward_s", "backward_s", "optimizer_s")  # means over all rows are reported
_RATES = ("seconds", "tokens_per_s")
_MAX_GATES = 256
_MAX_PARTS = 64
_OF_A_GATE = ("step", "layer", "mean", "std", "saturated_share")
_SHUT, _SATURATED = 0.01, 0.99


def reported_values(table: Table) -> tuple[dict[str, float], tuple[Row, ...]]:
    """Return the metrics of a run, and the table rows used by diagnosis rules."""
    return _metrics(table), (*_gates(table), *_step_cost(table))


def _metrics(table: Table) -> dict[str, float]:
    """Map the name of each metric in training.csv and evaluation.csv to its value."""
    rows = table("training.csv")
    if rows is None:
        return {}
    columns = {
        name: [value for row in rows if isinstance(value := row.get(name), float)]
        for name in ("step", "loss", *_LAST, *_MEAN)
    }
    # A list of one value for each metric, or an empty list.
    metrics = {"loss_first": columns["loss"][:1], "loss_last": columns["loss"][-1:]}
    metrics |= {name: columns[name][-1:] for name in _LAST}
    metrics |= {name: [sum(columns[name]) / len(columns[name])] for name in _MEAN if columns[name]}
    metrics |= _of_steps(rows)
    held_out = [value for row in table("evaluation.csv") or () if isinstance(value := row.get("loss"), float)]
    metrics |= {"eval_loss_first": held_out[:1], "eval_loss_last": held_out[-1:]}
    # A run that continues from a checkpoint counts the steps before the checkpoint too.
    steps = max(columns["step"], default=0.0)
    return {"steps": steps, **{name: values[0] for name, values in metrics.items() if values}}


def _of_steps(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the metrics for step time and token rate, leaving out the first step as a warm-up."""
    after = rows[1:] or rows
    seconds, rates = ([value for row in after if isinstance(value := row.get(name), float)] for name in _RATES)
    return {
        "step_s_median": [median(seconds)] if seconds else [],
        "tokens_per_s_median": [median(rates)] if rates else [],
        "tokens_per_s_slowest": [min(rates)] if rates else [],
    }


def _gates(table: Table) -> tuple[Row, ...]:
    """Return the statistics of each attention gate at the latest step."""
    whole = [row for row in table("gate_health.csv") or () if isinstance(row.get("branch"), str) and _is_of_a_gate(row)]
    latest = max((float(row["step"]) for row in whole), default=None)
    gate_rows = [row for row in whole if row["step"] == latest][:_MAX_GATES]
    return tuple({name: row[name] for name in _OF_A_GATE} | {"branch": str(row["branch"])[:40]} for row in gate_rows)


def _is_of_a_gate(row: Row) -> bool:
    numbers = [row.get(name) for name in _OF_A_GATE]
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)


_LONGEST_S = 1e9  # longer step times are ignored as nonsense
_SIZES = ("batch", "seq_len", "layers")
_COUNTED = ("nodes", "saved_bytes", "square_bytes", "expected_bytes", "begin_bytes", "peak_bytes")


def _step_cost(table: Table) -> Iterator[Row]:
    """Yield one row with the cost of a training step, or nothing if it was not recorded."""
    rows = [row for row in table("step_cost.csv") or () if all(_is_number(row.get(name)) for name in _SIZES)]
    if not rows:
        return
    cost: Row = {"step_cost": "of the first step", **{name: rows[0][name] for name in _SIZES}}
    for name in _COUNTED:
        values = _finite(rows, name)
        cost |= {name: max(values)} if values else {}
    yield cost | _implementations(table) | _time(table)


def _implementations(table: Table) -> Row:
    """Return the kernel implementations that were used, and the token count up to which they are valid."""
    counters = table("fallback_counters.csv") or table(f"fallback_counters{SHARDED}.csv") or ()
    rows = [row for row in counters if "implementation" in row][:_MAX_PARTS]
    names = sorted({f"{row['part']} {row['implementation']}"[:40] for row in rows if "part" in row})
    ends = _finite(rows, "until_tokens")
    return {"implementations": ", ".join(names)} | ({"until_tokens": min(ends)} if ends else {})


def _time(table: Table) -> Row:
    """Return the median time of a training step, and its relative standard error."""
    rows = (table("training.csv") or ())[1:]
    wall, processor = (_median(rows, name) for name in ("seconds", "cpu_s"))
    row: Row = {"seconds": wall[0], "error": wall[1], "steps": float(len(rows))} if wall else {}
    return row | ({"cpu_s": processor[0], "cpu_error": processor[1]} if processor else {})


def _median(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Return the median of a column and its relative standard error, or None if the column is empty.

    The standard error of a median is 1.2533 times that of a mean. The standard deviation is estimated as the distance
    of the quartiles divided by 1.349, because a single delayed step does not change the quartiles.
    """
    values = sorted(value for value in _finite(rows, name) if 0 < value < _LONGEST_S)
    if not values:
        return None
    middle = median(values)
    low, high = (values[round(share * (len(values) - 1))] for share in (0.25, 0.75))
    return middle, 1.2533 * (high - low) / 1.349 / math.sqrt(len(values)) / middle


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(name), float) and math.isfinite(value)]


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 1


def gate_collapse(context: DiagnosisContext) -> Explanation | None:
    """Explain a gate that is closed for almost all tokens. Return None if there is no such gate."""
    shut = [
        gate
        for gate in context.evidence.program_records
        if "branch" in gate and float(gate["mean"]) <= _SHUT and float(gate["saturated_share"]) >= _SATURATED
    ]
    if not shut:
        return None
    first = min(shut, key=lambda gate: (gate["layer"], gate["branch"]))
    layer = int(first["layer"])
    return Explanation(
        cause=Cause.GATE_COLLAPSE,
        evidence=EvidenceKind.PART,
        facts={
            "gates": len(shut),
            "at_step": int(first["step"]),
            "branch": first["branch"],
            "layer": layer,
            "mean": float(first["mean"]),
        },
        place=Place(layer=layer, module=f"blocks.{layer}.attn"),
        proof=("gate_health.csv",),
    )


# Least nodes per token and layer, and per layer, that count as growth. A normal layer has about 200 nodes.
_NODES_OF_A_TOKEN, _NODES_OF_A_LAYER = 4, 2000
_COST_PROOF = ("step_cost.csv",)


def _step_cost_numbers(context: DiagnosisContext) -> tuple[dict[str, float]] | None:
    """Return the cost of a training step in a 1-tuple, or None if the program did not report it."""
    row = next((row for row in context.evidence.program_records if "step_cost" in row), None)
    return ({name: float(value) for name, value in row.items() if not isinstance(value, str)},) if row else None


@rule_if(_step_cost_numbers)
def per_token_nodes(_: DiagnosisContext, cost: dict[str, float]) -> Explanation | None:
    """Explain an autograd graph that grows with the tokens, as a Python loop causes it, or return None."""
    nodes, layers, tokens = cost.get("nodes", 0.0), cost["layers"], cost["batch"] * cost["seq_len"]
    nodes_per_token = nodes / (tokens * layers)
    if nodes_per_token < _NODES_OF_A_TOKEN or nodes < _NODES_OF_A_LAYER * layers:
        return None
    return Explanation(
        cause=Cause.PER_TOKEN_NODES,
        evidence=EvidenceKind.FACT,
        facts={"nodes": nodes, "nodes_of_a_token": nodes_per_token, "tokens": tokens, "layers": int(layers)},
        proof=_COST_PROOF,
    )


_SQUARE_SHARE, _SQUARE_BYTES = 0.5, 16 << 20


@rule_if(_step_cost_numbers)
def quadratic_cost(_: DiagnosisContext, cost: dict[str, float]) -> Explanation | None:
    """Explain memory usage that grows with the square of the number of tokens. Return None if it does not."""
    square, saved_bytes = cost.get("square_bytes", 0.0), cost.get("saved_bytes", 0.0)
    if square < max(_SQUARE_BYTES, _SQUARE_SHARE * saved_bytes):
        return None
    return Explanation(
        cause=Cause.QUADRATIC_COST,
        evidence=EvidenceKind.FACT,
        facts={"variant": "memory", "kept_bytes": saved_bytes, "square_bytes": square, "tokens": cost["seq_len"]},
        proof=_COST_PROOF,
    )


_TIMES = 4
_KEPT_BYTES, _GROWN_BYTES = 64 << 20, 512 << 20  # least excess of the graph, and of a process, which varies more


@rule_if(_step_cost_numbers)
def memory_excess(_: DiagnosisContext, cost: dict[str, float]) -> Explanation | None:
    """Explain memory usage that exceeds what the model needs. Return None if it does not."""
    expected_bytes = cost.get("expected_bytes", math.inf)
    saved_bytes, growth_bytes = (
        cost.get("saved_bytes", 0.0),
        cost.get("peak_bytes", 0.0) - cost.get("begin_bytes", math.inf),
    )
    if saved_bytes > max(_TIMES * expected_bytes, expected_bytes + _KEPT_BYTES):
        variant, taken_bytes, evidence = "graph", saved_bytes, EvidenceKind.FACT
    elif growth_bytes > max(_TIMES * expected_bytes, expected_bytes + _GROWN_BYTES):
        variant, taken_bytes, evidence = "step", growth_bytes, EvidenceKind.PART
    else:
        return None
    return Explanation(
        cause=Cause.MEMORY_EXCESS,
        evidence=evidence,
        facts={
            "variant": variant,
            "taken_bytes": taken_bytes,
            "expected_bytes": expected_bytes,
            "times": taken_bytes / expected_bytes,
            "layers": int(cost["layers"]),
            "batch": cost["batch"],
            "tokens": cost["seq_len"],
        },
        proof=_COST_PROOF,
    )


# In the order in which their findings are reported.
RULES = (gate_collapse, per_token_nodes, quadratic_cost, memory_excess)
