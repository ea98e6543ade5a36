"""Rewrites the README's table of costs from benchmarks/results/probe_cost.json.

python tools/make_costs.py
"""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "probe_cost.json"
README = REPOSITORY / "README.md"
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"


def main() -> None:
    README.write_text(with_costs(README.read_text(), RESULTS.read_text()))


def with_costs(readme: str, results: str) -> str:
    """The README with the table of these results between its two comments."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_table(json.loads(results)['summary'])}\n{END}{after}"


def _table(summary: dict[str, float]) -> str:
    rows = (
        ("one mark", f"{summary['mark_ns_median'] / 1000:.2f} µs"),
        ("step of shape ci without the probe", f"{summary['step_ms_without_median']:.0f} ms"),
        ("what the hooks add to that step", f"{summary['hooks_wall_percent_median']:.1f} %"),
        ("the liveness thread, of one core", f"{summary['beat_share_percent']:.3f} %"),
    )
    return "\n".join(["| what | median |", "| --- | ---: |", *(f"| {what} | {cost} |" for what, cost in rows)])


if __name__ == "__main__":
    main()
