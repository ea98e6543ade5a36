"""Draw the cost of judging a job over its number of ranks, as SVG with logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 64, 64, 24, 40
_COLORS = {"cpu_s": "#2f6fb3", "peak_bytes": "#b3562f"}


def plot(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG picture of the CPU seconds (left axis) and the peak memory in MB (right axis) of each size."""
    rows = sorted((size for size in sizes if size["fault"] == "skips"), key=lambda size: size["ranks"])
    ranks = [row["ranks"] for row in rows]
    cpu_s = [row["cpu_s"] for row in rows]
    megabytes = [row["peak_bytes"] / 1e6 for row in rows]
    x_of = _axis(ranks, _LEFT, _WIDTH - _RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="CPU time and memory of a judgement over the number of ranks">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for rank in ranks:
        parts.append(_text(x_of(rank), _HEIGHT - _BOTTOM + 18, f"{rank:,}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "ranks", "middle"))
    for key, values, side in (("cpu_s", cpu_s, "left"), ("peak_bytes", megabytes, "right")):
        y_of = _axis(values, _HEIGHT - _BOTTOM - 24, _TOP + 16)
        points = [(x_of(rank), y_of(value)) for rank, value in zip(ranks, values, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLORS[key]}" stroke-width="2"/>')
        unit = "s" if key == "cpu_s" else "MB"
        for (x, y), value in zip(points, values, strict=True):
            shift = -8 if key == "cpu_s" else 18
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLORS[key]}"/>')
            parts.append(
                _text(x, y + shift, f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}", "middle")
            )
        name = "CPU time" if key == "cpu_s" else "peak memory"
        x, anchor = (8, "start") if side == "left" else (_WIDTH - 8, "end")
        parts.append(f'<text x="{x}" y="16" text-anchor="{anchor}" fill="{_COLORS[key]}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axis(values: Sequence[float], start: float, end: float) -> Any:
    """Return a function that maps a value to its position on a logarithmic axis from `start` to `end`."""
    low, high = log2(min(values)), log2(max(values))
    return lambda value: start + (end - start) * ((log2(value) - low) / (high - low) if high > low else 0.5)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{text}</text>'


def table(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured sizes as a Markdown table, with a line about the machine, the versions and the date."""
    rows = sorted((size for size in sizes if size["fault"] == "skips"), key=lambda size: size["ranks"])
    lines = [
        "| ranks | CPU time | CPU time per rank | wall time | peak memory | files of the run | `report.html` |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['ranks']:,} | {row['cpu_s']:.1f} s | {1000 * row['cpu_s'] / row['ranks']:.0f} ms"
            f" | {row['wall_s']:.0f} s | {row['peak_bytes'] / 1e6:,.0f} MB | {row['evidence_bytes'] / 1e6:,.0f} MB"
            f" | {row['document_bytes']['report.html'] / 1e3:.0f} kB |"
            for row in rows
        ),
    ]
    loads = [row["measured"]["load_1min"] for row in rows]
    measured = rows[-1]["measured"]
    context = (
        f"Measured on {measured['date'][:10]} with Python {measured['versions']['python']} on a machine with"
        f" {measured['cpus']} cores. Its load before each measurement was {min(loads):.1f} to {max(loads):.1f}."
    )
    if max(loads) > measured["cpus"]:
        context += " The wall times are therefore those of a machine that was shared, and CPU times are longer too."
    return "\n".join([*lines, "", context])
