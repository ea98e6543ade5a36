"""Rebuild the cost tables in the documentation from stored benchmark results.

python tools/make_costs.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"


def main() -> None:
    for name in TABLES:
        document = REPOSITORY / name
        document.write_text(with_costs(name, document.read_text()))


def with_costs(name: str, document: str) -> str:
    """Return the document with the cost table for the page `name` updated."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    head, rows = TABLES[name]()
    dashes = " | ".join(["---", *["---:"] * (len(head) - 1)])
    lines = [f"| {' | '.join(head)} |", f"| {dashes} |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def _harness() -> tuple[list[str], list[tuple[str, ...]]]:
    probe, launch = _summary("probe_cost"), _summary("launch_cost")
    return ["what", "median"], [
        ("recording one progress event", f"{probe['mark_ns_median'] / 1000:.2f} µs"),
        ("a training step of shape ci without the probe", f"{probe['step_ms_without_median']:.0f} ms"),
        ("added to that step by the probe's hooks", f"{probe['hooks_wall_percent_median']:.1f} %"),
        ("share of one core used by the probe's heartbeat thread", f"{probe['beat_share_percent']:.3f} %"),
        ("added to the first run, compared with torchrun alone", f"{launch['first_s_median']:.1f} s"),
        ("added to each further run of the same command", f"{launch['further_s_median']:.1f} s"),
    ]


def _subject() -> tuple[list[str], list[tuple[str, ...]]]:
    rows = [
        (
            f"step of {length['layers']} layers, {length['tokens']} tokens{note}",
            f"{length['summary'][f'{kind}_vanilla_wall_s_median']:.1f} s",
            f"{length['summary'][f'{kind}_nsa_wall_s_median']:.1f} s",
            f"{length['summary'][f'{kind}_wall_s_ratio_median']:.2f}",
        )
        for length in _result("nsa_step_cost")["lengths"]
        for kind, note in (("kept", ""), ("checkpointed", ", gradient checkpointing"))
        if kind in length["samples"]
    ]
    rows += [
        (
            f"held-out loss after {amount.format(**end)}, seed {end['seed']}",
            f"{end[f'vanilla_loss_{at}']:.2f}",
            f"{end[f'nsa_loss_{at}']:.2f}",
            f"{1 + end[f'excess_{at}']:.2f}",
        )
        for at, amount in (
            ("at_equal_tokens", "{tokens:,} tokens"),
            ("at_equal_time", "{cpu_s:.0f} s of processor time"),
        )
        for end in _result("nsa_learning")["summary"]
    ]
    samples = {(one["attention"], one["impl"], one["layers"]): one["ratio"] for one in _result("nsa_memory")["samples"]}
    memory = [samples[attention, "auto", "kept"] for attention in ("vanilla", "nsa")]
    rows.append(("memory at 8192 tokens divided by memory at 2048 tokens", *(f"{ratio:.2f}" for ratio in memory), ""))
    return ["what", "vanilla", "NSA", "NSA / vanilla"], rows


def _summary(name: str) -> dict[str, Any]:
    return dict(_result(name)["summary"])


def _result(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


TABLES: dict[str, Callable[[], tuple[list[str], list[tuple[str, ...]]]]] = {
    "README.md": _harness,
    "docs/internals/nsa/performance.md": _subject,
}


if __name__ == "__main__":
    main()
