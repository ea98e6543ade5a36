"""The plan with one fault at a time planted into all of its runs: is the true hypothesis supported, and no other one?

    python tools/plan_truth.py run [--only 'layer*']    runs what has no cell yet, or matches; resumable
    python tools/plan_truth.py page                     writes the table into docs/accuracy.md

A cell is one run of `nsa-harness run -t plan`, healthy or with a fault that acts only under its condition, so that each
hypothesis is made the true one once. Cells are kept in benchmarks/results/plan_truth.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from tools.twelve import harness  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "plan_truth.json"
PLAN = ("run", "-t", "plan")
SUPPORTED, REFUTED = "supported", "refuted"
LIMIT_S = 1800.0
LEAVE_S = 120.0

DDP = "DDP is the cause"
RANKS = "more than one rank is the cause"
GC = "gradient checkpointing is the cause"
ATTENTION = "NSA's attention is the cause"
SELECTION = "the selection branch is the cause"
LAYERS = "the layer count is the cause"
NCCL = "NCCL is the cause"
STATIC_GRAPH = "static_graph changes it"
FIND_UNUSED = ("find_unused_parameters is needed", "find_unused_parameters changes it")


@dataclass(frozen=True, kw_only=True)
class Plant:
    """What is planted into every run of the plan, and what is then true."""

    name: str
    what: str  # for people
    words: tuple[str, ...] = ()  # overrides
    true: tuple[str, ...] = ()  # hypotheses that must be supported
    implied: tuple[str, ...] = ()  # true as well: supported or not tested, and not refuted
    gpus: int = 0  # without so many the fault can happen in no run


def fault(kind: str, **when: object) -> tuple[str, ...]:
    """In rank 0, which every run has. Layer 0 is there in every model."""
    given = [f"fault.when.{key}={json.dumps(value)}" for key, value in when.items()]
    layer = [] if any("recomputed" in key for key in when) else ["fault.layer=0"]
    return (f"fault.kind={kind}", "fault.rank=0", *layer, *given)


_SLOW = ("fault.heals_s=600", "limits.deadline_s=45")
PLANTS = (
    Plant(name="none", what="nothing"),
    Plant(
        name="checkpointing",
        what="a layer that is computed again hangs in backward",
        words=fault("deadlock", recomputed_layers=1),
        true=(GC,),
    ),
    Plant(
        name="layer_7_on",
        what="layers 7 to 11 hang where they are computed again",
        words=fault("deadlock", any_recomputed="7:12"),
        true=(GC,),
    ),
    Plant(
        name="ddp",
        what="backward hangs under DDP",
        words=fault("deadlock", module="DistributedDataParallel"),
        true=(DDP,),
    ),
    Plant(
        name="attention", what="NSA's attention fails", words=fault("raise", module="NSAttention"), true=(ATTENTION,)
    ),
    Plant(
        name="selection",
        what="the selection branch fails in backward",
        words=fault("deadlock", module="SelectedBranch"),
        true=(SELECTION,),
        implied=(ATTENTION,),
    ),
    Plant(
        name="selection_slow",
        what="the selection branch is a loop over tokens, too slow for its deadline",
        words=(*fault("slow_step", module="SelectedBranch"), *_SLOW),
        implied=(SELECTION, ATTENTION),  # slow is named by its run: no comparison is needed
    ),
    Plant(name="ranks", what="fails in any job of two ranks", words=fault("raise", ranks=2), true=(RANKS,)),
    Plant(
        name="five_layers", what="backward hangs from five layers on", words=fault("deadlock", layers=5), true=(LAYERS,)
    ),
    Plant(
        name="static_graph",
        what="fails under DDP unless its graph is static",
        words=fault("raise", static_graph=False),
        true=(STATIC_GRAPH, DDP),
    ),
    Plant(
        name="find_unused_off",
        what="fails under DDP unless it looks for unused parameters",
        words=fault("raise", find_unused_parameters=False),
        true=(DDP,),
        implied=FIND_UNUSED,
    ),
    Plant(
        name="find_unused_on",
        what="fails under DDP where it looks for unused parameters",
        words=fault("raise", find_unused_parameters=True),
        implied=FIND_UNUSED[1:],
    ),
    Plant(
        name="ready_twice",
        what="reentrant checkpointing, and a DDP that looks for unused parameters",
        words=("gc.layers=all", "gc.mode=reentrant", "parallel.find_unused_parameters=true"),
        true=(DDP,),
        implied=(STATIC_GRAPH,),
    ),
    Plant(name="nccl", what="fails over NCCL", words=fault("raise", backend="nccl"), true=(NCCL,), gpus=2),
    Plant(name="killed", what="rank 0 of every run is killed", words=fault("sigkill")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("--only", default="", help="a pattern of names; those are run anew")
    run.add_argument("--limit", type=float, default=0.0, help="seconds after which no further one begins")
    run.add_argument("--results", type=Path, default=RESULTS)
    commands.add_parser("page")
    told = parser.parse_args()
    if told.command == "page":
        write_page()
        return
    begun_s = time.monotonic()
    for plant in due(load(told.results)["cells"], told.only):
        if told.limit and time.monotonic() - begun_s > told.limit:
            break
        cell = cell_of(plant)
        keep(told.results, plant.name, cell)
        print(f"{plant.name:16} {'; '.join(mistakes(plant, cell)) or 'right'}   {cell['seconds']:.0f} s", flush=True)


def due(cells: Mapping[str, Any], only: str) -> list[Plant]:
    """What matches; else what was never run, or is planted otherwise since."""
    if only:
        return [plant for plant in PLANTS if fnmatchcase(plant.name, only)]
    return [plant for plant in PLANTS if plant.name not in cells or cells[plant.name]["planted"] != digest(plant)]


def digest(plant: Plant) -> str:
    return hashlib.sha256(repr(plant.words).encode()).hexdigest()[:16]


def load(results: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"cells": {}}
    return known


def keep(results: Path, name: str, cell: Mapping[str, Any]) -> None:
    from benchmarks.circumstances import circumstances

    about = circumstances(__file__, ["run"])
    cells = {**load(results)["cells"], name: {**cell, "commit": about["commit"]}}
    ordered = {plant.name: cells[plant.name] for plant in PLANTS if plant.name in cells}
    results.write_text(json.dumps({**about, "cells": ordered}, indent=1) + "\n")


def cell_of(plant: Plant) -> dict[str, Any]:
    """One run of the plan in a folder of its own, and what its report says."""
    with tempfile.TemporaryDirectory(prefix="plan") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "_NSA_"))}
        begun_s = time.monotonic()
        with (Path(folder) / "said.txt").open("w") as said:
            process = subprocess.Popen(
                [harness(), *PLAN, *plant.words, "--out", folder], cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends its runs and writes its report
                process.wait(LEAVE_S)
        seconds = time.monotonic() - begun_s
        reports = sorted(Path(folder).glob("2*/report.json"))
        if not reports:
            raise SystemExit(f"{plant.name}: no report; it said\n{(Path(folder) / 'said.txt').read_text()[-2000:]}")
        stored = json.loads(reports[0].read_text())
    return {
        "planted": digest(plant),
        "command": " ".join(["nsa-harness", *PLAN, *plant.words]),
        "code": process.returncode,
        "seconds": round(seconds, 1),
        **answers_in(stored),
    }


def answers_in(report: Mapping[str, Any]) -> dict[str, Any]:
    """How each run ended, and the rows of its table of hypotheses."""
    return {
        "gpus": len(report["machine"]["gpus"]),
        "runs": {one["scenario"]: _ending(one) for one in report["outcomes"] if one["final"]},
        "hypotheses": [
            {
                "text": row["text"],
                "answer": row["answer"],
                "runs": [row[side]["scenario"] for side in ("control", "changed") if row[side]],
            }
            for row in report["detail"]["hypotheses"]
        ],
    }


def _ending(outcome: Mapping[str, Any]) -> str:
    return " ".join(part for part in (outcome["verdict"], outcome["cause"]) if part)


def answered(cell: Mapping[str, Any], answer: str) -> list[str]:
    """Hypotheses with this answer. One that runs answer differently counts as what it says first."""
    first: dict[str, str] = {}
    for row in cell["hypotheses"]:
        first.setdefault(row["text"], row["answer"])
    return [text for text, said in first.items() if said == answer]


def mistakes(plant: Plant, cell: Mapping[str, Any]) -> list[str]:
    """Each hypothesis that is wrongly supported, wrongly refuted, or true and not supported."""
    supported, refuted = answered(cell, SUPPORTED), answered(cell, REFUTED)
    true = plant.true if cell["gpus"] >= plant.gpus else ()
    also = (*plant.true, *plant.implied)
    return [
        *(f"wrongly supported: {text}" for text in supported if text not in also),
        *(f"wrongly refuted: {text}" for text in refuted if text in also),
        *(f"not supported: {text}" for text in true if text not in (*supported, *refuted)),
    ]


BEGIN, END = "<!-- plan truth -->", "<!-- end of plan truth -->"


def page(known: Mapping[str, Any]) -> list[str]:
    """The section of docs/accuracy.md: a row a plant, and each mistake."""
    cells = known["cells"]
    run = [(plant, cells[plant.name]) for plant in PLANTS if plant.name in cells]
    right = sum(not mistakes(plant, cell) for plant, cell in run)
    return [
        BEGIN,
        "## The plan and one fault",
        "",
        "`nsa-harness run -t plan`, healthy and with one fault at a time planted into all of its runs. Each acts only",
        "under its condition, so that one hypothesis is the true one; what is supported is held against that.",
        "`tools/plan_truth.py run` makes the cells anew.",
        "",
        f"{len(run)} of {len(PLANTS)} run: {right} right.",
        "",
        "| planted | true | supported | refuted | did not pass | seconds |",
        "| --- | --- | --- | ---: | --- | ---: |",
        *(_row(plant, cell) for plant, cell in run),
        "",
        *_listed(run),
        END,
    ]


def _row(plant: Plant, cell: Mapping[str, Any]) -> str:
    true = plant.true if cell["gpus"] >= plant.gpus else ()
    not_passed = [ending for ending in cell["runs"].values() if not ending.startswith(("PASS", "SKIP"))]
    counts = [f"{not_passed.count(ending)} {ending}" for ending in dict.fromkeys(not_passed)]
    return (
        f"| {plant.what} | {_texts(true)} | {_texts(answered(cell, SUPPORTED))} | {len(answered(cell, REFUTED))} |"
        f" {', '.join(counts) or 'none'} of {len(cell['runs'])} | {cell['seconds']:.0f} |"
    )


def _texts(texts: Sequence[str]) -> str:
    return "; ".join(texts) or "none"


def _listed(run: Sequence[tuple[Plant, Mapping[str, Any]]]) -> Iterator[str]:
    found = [f"- `{plant.name}`: {one}." for plant, cell in run for one in mistakes(plant, cell)]
    yield from [*found, ""] if found else []


def write_page() -> None:
    document = REPOSITORY / "docs" / "accuracy.md"
    text = document.read_text()
    if BEGIN in text:
        before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) + 1 :]
    else:
        at = text.index("## Our own corpus")
        before, after = text[:at], "\n" + text[at:]
    document.write_text(before + "\n".join(page(load(RESULTS))) + "\n" + after)


if __name__ == "__main__":
    main()
