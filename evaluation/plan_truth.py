"""The plan with one fault at a time planted into all of its runs: is the true hypothesis supported, and no other one?

A case is one run of `nsa-harness run -t plan`, healthy or with a fault that acts only under its condition, so that each
hypothesis is made the true one once. truth/plan_truth.toml says what is planted, and what is then true.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.experiments import Cell, Experiment, Results, digest_of, truths_of
from evaluation.launching import harness, scratch
from evaluation.scoring import Row, paragraph

PLAN = ("run", "-t", "plan")
SUPPORTED, REFUTED = "supported", "refuted"
LIMIT_S = 1800.0
# True of PyTorch, whatever is planted: DDP with find_unused_parameters fails with reentrant checkpointing.
ALWAYS_TRUE = ("reentrant gradient checkpointing under DDP is the cause", "find_unused_parameters changes it")


@dataclass(frozen=True, kw_only=True)
class Plant:
    """What is planted into every run of the plan, and what is then true."""

    name: str
    what: str  # for people
    words: tuple[str, ...]  # overrides
    true: tuple[str, ...]  # hypotheses that must be supported
    implied: tuple[str, ...]  # true as well: supported or not tested, and not refuted
    gpus: int = 0  # the fault happens in no run without as many

    def true_on(self, gpus: int) -> tuple[str, ...]:
        return self.true if gpus >= self.gpus else ()


def read(name: str, *, what: str, words: str = "", gpus: int = 0, **texts: list[str]) -> Plant:
    true, implied = (tuple(texts.get(key, ())) for key in ("true", "implied"))
    return Plant(name=name, what=what, words=tuple(shlex.split(words)), true=true, implied=implied, gpus=gpus)


PLANTS = {name: read(name, **stored) for name, stored in truths_of("plan_truth").items()}


def digest(plant: Plant) -> str:
    return digest_of(plant.words)


def launch(case: str) -> dict[str, Any]:
    """Run the plan once, and return what its report says."""
    words = (*PLAN, *PLANTS[case].words)
    with scratch() as place:
        ran = place.ran([harness(), *words], LIMIT_S)
        report = place.stored("report.json")
        if report is None:
            raise SystemExit(f"{case}: no report; it said\n{ran.output[-2000:]}")
    return {
        "planted": digest(PLANTS[case]),
        "command": " ".join(["nsa-harness", *words]),
        "code": ran.code,
        "seconds": round(ran.seconds, 1),
        **answers_in(report),
    }


def answers_in(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return how each run ended, and the rows of the table of hypotheses."""
    return {
        "gpus": len(report["machine"]["gpus"]),
        "runs": {outcome["scenario"]: ending(outcome) for outcome in report["outcomes"] if outcome["final"]},
        "hypotheses": [
            {
                "text": row["text"],
                "answer": row["answer"],
                "runs": [row[side]["scenario"] for side in ("control", "changed") if row[side]],
            }
            for row in report["detail"]["hypotheses"]
        ],
    }


def ending(outcome: Mapping[str, Any]) -> str:
    """Verdict and cause of an outcome of report.json."""
    return " ".join(part for part in (outcome["verdict"], outcome["cause"]) if part)


def answered(cell: Cell, answer: str) -> list[str]:
    """The hypotheses with this answer. A hypothesis that is answered several times counts by its first answer."""
    first: dict[str, str] = {}
    for row in cell["hypotheses"]:
        first.setdefault(row["text"], row["answer"])
    return [text for text, said in first.items() if said == answer]


def mistakes(plant: Plant, cell: Cell) -> list[str]:
    """Each hypothesis that is wrongly supported, wrongly refuted, or true and not supported."""
    supported, refuted = answered(cell, SUPPORTED), answered(cell, REFUTED)
    also = (*plant.true, *plant.implied)
    return [
        *(f"wrongly supported: {text}" for text in supported if text not in (*also, *ALWAYS_TRUE)),
        *(f"wrongly refuted: {text}" for text in refuted if text in also),
        *(f"not supported: {text}" for text in plant.true_on(cell["gpus"]) if text not in (*supported, *refuted)),
    ]


def describe(case: str, cell: Cell) -> str:
    return f"{'; '.join(mistakes(PLANTS[case], cell)) or 'right'}   {cell['seconds']:.0f} s"


def _run(results: Results) -> list[tuple[Plant, Cell]]:
    return [(plant, results["cells"][name]) for name, plant in PLANTS.items() if name in results["cells"]]


def _right(run: Iterable[tuple[Plant, Cell]]) -> int:
    return sum(not mistakes(plant, cell) for plant, cell in run)


def rows(results: Results) -> dict[str, Row]:
    run = _run(results)
    return {"plan with one fault": {"cases": str(len(run)), "answer": f"{_right(run)} of {len(run)}"}}


EXPERIMENT = Experiment(
    name="plan_truth",
    cases=tuple(PLANTS),
    launch=launch,
    describe=describe,
    rows=rows,
    fingerprint=lambda case: {"planted": digest(PLANTS[case])},
)


def section(results: Results) -> list[str]:
    """Return the section of accuracy.md: a row per planted fault, and each mistake."""
    run = _run(results)
    mistaken = [f"- `{plant.name}`: {mistake}." for plant, cell in run for mistake in mistakes(plant, cell)]
    return [
        "<!-- plan truth -->",
        "## The plan with one planted fault",
        "",
        *paragraph(
            """
            `nsa-harness run -t plan` ran once healthy and once with each of these faults planted into all of its
            scenarios. Each fault acts only under its condition, so it is known which hypothesis is true. The table
            compares that with the hypotheses that the plan supported. `python -m evaluation run plan_truth` repeats
            the runs.
            """
        ),
        "",
        f"{len(run)} of {len(PLANTS)} plans run: {_right(run)} right.",
        "",
        "| planted fault | true hypotheses | supported | refuted | scenarios that did not pass | seconds |",
        "| --- | --- | --- | ---: | --- | ---: |",
        *(_row(plant, cell) for plant, cell in run),
        "",
        *([*mistaken, ""] if mistaken else ()),
        "<!-- end of plan truth -->",
        "",
    ]


def _row(plant: Plant, cell: Cell) -> str:
    not_passed = [ending for ending in cell["runs"].values() if not ending.startswith(("PASS", "SKIP"))]
    counts = [f"{not_passed.count(ending)} {ending}" for ending in dict.fromkeys(not_passed)]
    return (
        f"| {plant.what} | {_texts(plant.true_on(cell['gpus']))} | {_texts(answered(cell, SUPPORTED))} |"
        f" {len(answered(cell, REFUTED))} | {', '.join(counts) or 'none'} of {len(cell['runs'])} |"
        f" {cell['seconds']:.0f} |"
    )


def _texts(texts: Sequence[str]) -> str:
    return "; ".join(texts) or "none"
