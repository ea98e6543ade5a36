"""Show the results from benchmarks/nsa_op.py as Markdown tables and as a plot."""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Goals in milliseconds at 65536 tokens, for forward and backward.
GOALS_MS = {"goal": (27.0, 58.0), "stretch": (22.0, 46.0)}
GOAL_TOKENS = 65536


def table(result: dict[str, Any]) -> str:
    """Return the results as Markdown tables of median execution times.

    The tables also contain the fraction of the lower bound that is reached, and the ratio to the fastest dense
    attention.
    """
    lines = [
        "| T | NSA forward | share | NSA backward | share | best dense forward | backward | ratio | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for length in result["lengths"]:
        rows = {row["name"]: row for row in length["rows"] if "missing" not in row}
        if "nsa" not in rows:
            lines.append(f"| {length['shape']['tokens']} | not measured | | | | | | | |")
            continue
        ours, floors = rows["nsa"], (length["floors_ms"] or {}).get("whole")
        forward, backward = (statistics.median(ours[f"{way}_ms"]) for way in ("forward", "backward"))
        best = _best_dense(rows)
        cells = [str(length["shape"]["tokens"]), f"{forward:.2f}", _share(floors, "forward", forward)]
        cells += [f"{backward:.2f}", _share(floors, "backward", backward)]
        if best is None:
            cells += ["", "", ""]
        else:
            name, dense_forward, dense_backward = best
            ratio = (dense_forward + dense_backward) / (forward + backward)
            cells += [f"{dense_forward:.2f} ({name})", f"{dense_backward:.2f}", f"{ratio:.2f}x"]
        peak = ours["peak_bytes"]
        lines.append("| " + " | ".join([*cells, "" if peak is None else f"{peak / 2**20:.0f}"]) + " |")
    return "\n".join([*lines, "", *_part_rows(result), "", *_selection_rows(result), "", *_remarks(result)]) + "\n"


def _part_rows(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the execution time of each part of the NSA operation."""
    yield "| T | part | forward | share of floor | backward | share of floor |"
    yield "|---|---|---|---|---|---|"
    for length in result["lengths"]:
        for row in length["rows"]:
            prefix, _, part = row["name"].partition(".")
            if prefix != "nsa" or not part or ", " in part or "missing" in row:
                continue
            floors, cells = (length["floors_ms"] or {}).get(part), [str(length["shape"]["tokens"]), part]
            for way in ("forward", "backward"):
                samples = row[f"{way}_ms"]
                ms = statistics.median(samples) if samples else None
                cells += ["", ""] if ms is None else [f"{ms:.2f}", _share(floors, way, ms)]
            yield "| " + " | ".join(cells) + " |"


def _selection_rows(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table that compares the execution times for different block selections."""
    head = ["T", "choices", "selected forward", "backward", "of random", "NSA forward", "backward"]
    head += ["best dense", "others' selected"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for length in result["lengths"]:
        rows = {row["name"]: row for row in length["rows"] if "missing" not in row and row["backward_ms"]}
        best = _best_dense(rows)
        dense = best[1] + best[2] if best is not None else None
        for name in [name.partition(", ")[2] for name in rows if name.startswith("nsa.selected, ")]:
            selected_ms, whole_ms = (_median_ms(rows.get(f"{part}, {name}")) for part in ("nsa.selected", "nsa"))
            random_ms = _median_ms(rows.get("nsa.selected, random choices"))
            external_ms = _median_ms(rows.get(f"native-sparse-attention-triton selected, {name}"))
            cells = [
                str(length["shape"]["tokens"]),
                name,
                *_cells(selected_ms),
                _ratio(selected_ms, random_ms, "{:.2f}x"),
            ]
            cells += [
                *_cells(whole_ms),
                _ratio((dense,), whole_ms, "{:.2f}x"),
                _ratio(external_ms, selected_ms, "{:.2f}x"),
            ]
            yield "| " + " | ".join(cells) + " |"


def _median_ms(row: dict[str, Any] | None) -> tuple[float, ...]:
    return tuple(statistics.median(row[f"{way}_ms"]) for way in ("forward", "backward")) if row else ()


def _cells(both: tuple[float, ...]) -> list[str]:
    return [f"{ms:.2f}" for ms in both] or ["", ""]


def _ratio(above: tuple[float | None, ...], below: tuple[float, ...], template: str) -> str:
    values = [value for value in above if value is not None]
    return template.format(sum(values) / sum(below)) if values and below else ""


def _share(floors: dict[str, float] | None, way: str, measured_ms: float) -> str:
    return "" if floors is None else f"{floors[way] / measured_ms:.0%}"


def _best_dense(rows: dict[str, dict[str, Any]]) -> tuple[str, float, float] | None:
    sums = {
        name: [statistics.median(row[f"{way}_ms"]) for way in ("forward", "backward")]
        for name, row in rows.items()
        if name.startswith(("torch.", "flash-attn")) and row["backward_ms"]
    }
    if not sums:
        return None
    best = min(sums, key=lambda name: sum(sums[name]))
    return best, *sums[best]


def _remarks(result: dict[str, Any]) -> Iterator[str]:
    """Yield remarks on the results, for example on whether the performance goals were met."""
    even = break_even(result)
    yield "Break-even, forward and backward, against the best dense one: " + (
        "none" if even is None else f"{even:.0f} tokens"
    )
    for length in result["lengths"]:
        rows = {row["name"]: row for row in length["rows"] if "missing" not in row}
        if length["shape"]["tokens"] == GOAL_TOKENS and "nsa" in rows:
            ways = [statistics.median(rows["nsa"][f"{way}_ms"]) for way in ("forward", "backward")]
            for name, goals in GOALS_MS.items():
                judgements = [
                    "met" if ms <= goal else f"missed by {ms / goal - 1:.0%}"
                    for ms, goal in zip(ways, goals, strict=True)
                ]
                forward, backward = (
                    f"{goal} ms {judgement}" for goal, judgement in zip(goals, judgements, strict=True)
                )
                yield f"{name} at {GOAL_TOKENS}: forward {forward}, backward {backward}"
    missing = {
        row["name"]: row["missing"] for length in result["lengths"] for row in length["rows"] if "missing" in row
    }
    for name, reason in missing.items():
        yield f"not measured: {name}: {reason}"


def break_even(result: dict[str, Any]) -> float | None:
    """Return the sequence length above which NSA is faster than dense attention, or None if there is no such length.

    It is interpolated linearly between two measured lengths.
    """
    points = []
    for length in result["lengths"]:
        rows = {row["name"]: row for row in length["rows"] if "missing" not in row}
        best = _best_dense(rows)
        if "nsa" in rows and best is not None:
            ours = sum(statistics.median(rows["nsa"][f"{way}_ms"]) for way in ("forward", "backward"))
            points.append((length["shape"]["tokens"], best[1] + best[2] - ours))
    if points and points[0][1] > 0:
        return float(points[0][0])
    for (tokens, ahead), (later, further) in itertools.pairwise(points):
        if ahead <= 0 < further:
            return tokens + (later - tokens) * -ahead / (further - ahead)
    return None


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the execution times against the sequence length, and save the figure to `path`."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    names = dict.fromkeys(row["name"] for length in result["lengths"] for row in length["rows"])
    for name in names:
        points = []
        for length in result["lengths"]:
            row = next((row for row in length["rows"] if row["name"] == name and "missing" not in row), None)
            if row is not None and row["backward_ms"] and not name.startswith("nsa."):
                total = sum(statistics.median(row[f"{way}_ms"]) for way in ("forward", "backward"))
                points.append((length["shape"]["tokens"], total))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms", title=result["device"])
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
