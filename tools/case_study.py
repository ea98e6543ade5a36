"""The seeds' two weeks as the tool tells them: what was believed as claims, what it was, and the minutes it took.

    python tools/case_study.py run [--only 'five*']    runs what was never run in this form, or matches; resumable
    python tools/case_study.py page                    writes docs/case-study.md

Each chapter is one command; its output, its lines of the ledger and its outcomes are kept in
benchmarks/results/case_study.json, from which the page takes every number.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from tools.twelve import harness, without_paths  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "case_study.json"
PAGE = REPOSITORY / "docs" / "case-study.md"
LIMIT_S = 1800.0
LEAVE_S = 120.0

# Their job on two cores: five layers under DDP, all of them checkpointed, the selected branch as a loop over tokens.
# The deadline is one that the same model without the loop keeps with room to spare.
LOOP = (
    "seed_token_loop", "run.ranks=2", "parallel.wrapper=ddp", "model.layers=5", "gc.layers=all", "train.steps=6",
    "limits.deadline_s=12",
)  # fmt: skip
SUPPORTED, REFUTED, NOT_COMPARABLE = "supported", "refuted", "not comparable"


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One command, what was believed when it would have helped, and how it must end."""

    name: str
    title: str
    told: str  # what the team saw or believed, and from where
    words: tuple[str, ...]
    right: str  # result of a claim, or verdict and cause of a run


def loop_without(key: str, *words: str) -> tuple[str, ...]:
    """Their job, with one of its keys left to the claim."""
    return tuple(word for word in LOOP if not word.startswith(f"{key}=")) + words


CHAPTERS = (
    Chapter(
        name="symptom",
        title="What was seen",
        told="A first step that does not end; after its time limit it was killed and called a hang (seeds 1 to 4).",
        words=("run", *LOOP),
        right="FAIL slow",
    ),
    Chapter(
        name="ddp",
        title="DDP is the cause",
        told="Seed 1 and 4: DDP cannot synchronize the gradients of an attention with three branches. The control"
        " averages the gradients by hand.",
        words=("claim", *loop_without("parallel.wrapper", "parallel.wrapper=ddp,manual"), "--text=DDP is the cause"),
        right=REFUTED,
    ),
    Chapter(
        name="find_unused",
        title="find_unused_parameters mends it",
        told="Seed 1 and 4: the first patch.",
        words=(
            "claim", *LOOP, "parallel.find_unused_parameters=false,true", "--text=find_unused_parameters mends it",
        ),
        right=REFUTED,
    ),
    Chapter(
        name="checkpointing",
        title="Gradient checkpointing is the cause",
        told="Seed 1 and 2: a bug of its own in the checkpointing, which makes the backward pass hang.",
        words=("claim", *loop_without("gc.layers", "gc.layers=all,none"), "--text=gradient checkpointing is the cause"),
        right=REFUTED,
    ),
    Chapter(
        name="five_layers",
        title="Five layers are one too many",
        told="Seed 3: the backward pass hangs from five layers on, so train with four.",
        words=("claim", *loop_without("model.layers", "model.layers=5,4"), "--text=it hangs from five layers on"),
        right=REFUTED,
    ),
    Chapter(
        name="fsdp",
        title="FSDP instead of DDP",
        told="Seed 2: the failure is the wrapper's, so shard the model instead.",
        words=("claim", *loop_without("parallel.wrapper", "parallel.wrapper=ddp,fsdp"), "--text=FSDP avoids it"),
        right=REFUTED,
    ),
    Chapter(
        name="nccl",
        title="NCCL is the cause",
        told="Seed 1 and 4: P2P was switched off in vain, the backend itself was never exchanged.",
        words=("claim", *LOOP, "needs.backend=nccl,gloo", "--text=NCCL is the cause"),
        right=NOT_COMPARABLE,
    ),
    Chapter(
        name="loop",
        title="What it was",
        told="Found after two weeks: a Python loop over the tokens in the selected branch, slow and not stuck. The"
        " report of the first run names it; this is its control.",
        words=(
            "claim", *LOOP, "expect.findings=[]", "model.impl=per_token,auto",
            "--text=the loop over tokens is the cause",
        ),
        right=SUPPORTED,
    ),
    Chapter(
        name="ready_twice",
        title="The one that was real",
        told="Seed 2: the last layer's MLP is marked ready twice.",
        words=("run", "seed_ready_twice"),
        right="FAIL ready_twice",
    ),
    Chapter(
        name="non_reentrant",
        title="Non-reentrant checkpointing mends it",
        told="The first of the two ways out that the report proposes.",
        words=("claim", "seed_ready_twice", "gc.mode=reentrant,non_reentrant", "--text=non-reentrant GC mends it"),
        right=SUPPORTED,
    ),
    Chapter(
        name="not_looking",
        title="Not looking for unused parameters mends it",
        told="The second one: the patch of seed 4 was part of the failure.",
        words=(
            "claim", "seed_ready_twice", "parallel.find_unused_parameters=true,false",
            "--text=without find_unused_parameters it trains",
        ),
        right=SUPPORTED,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("--only", default="", help="a pattern of names; those are run anew")
    commands.add_parser("page")
    told = parser.parse_args()
    if told.command == "page":
        PAGE.write_text("\n".join(page(load())) + "\n")
        return
    for chapter in due(load()["chapters"], told.only):
        seen = seen_of(chapter)
        keep(chapter, seen)
        verdict = "right" if seen["result"] == chapter.right else f"{seen['result']}, expected {chapter.right}"
        print(f"{chapter.name:16} {verdict}   {seen['seconds']:.0f} s", flush=True)


def due(known: Mapping[str, Any], only: str) -> list[Chapter]:
    """What matches; else what was never run by these words."""
    if only:
        return [chapter for chapter in CHAPTERS if fnmatchcase(chapter.name, only)]
    return [one for one in CHAPTERS if one.name not in known or known[one.name]["command"] != command_of(one)]


def command_of(chapter: Chapter) -> str:
    return shlex.join(["nsa-harness", *chapter.words])


def load() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"chapters": {}}
    return known


def keep(chapter: Chapter, seen: Mapping[str, Any]) -> None:
    from benchmarks.circumstances import circumstances

    about = circumstances(__file__, ["run"])
    chapters = {**load()["chapters"], chapter.name: {**seen, "commit": about["commit"], "load": about["load_1min"]}}
    ordered = {one.name: chapters[one.name] for one in CHAPTERS if one.name in chapters}
    RESULTS.write_text(json.dumps({**about, "chapters": ordered}, indent=1) + "\n")


def seen_of(chapter: Chapter) -> dict[str, Any]:
    """The command in a folder of its own: what it printed, how it ended, and what it added to the ledger."""
    with tempfile.TemporaryDirectory(prefix="case") as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("NSA_", "_NSA_"))}
        begun_s = time.monotonic()
        with (folder / "said.txt").open("w") as said:
            process = subprocess.Popen(
                [harness(), *chapter.words], cwd=folder, env={**environment, "COLUMNS": "100"},
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends its runs and keeps what was counted
                process.wait(LEAVE_S)
        seconds = time.monotonic() - begun_s
        ledger = folder / "reports" / "claims.jsonl"
        line = json.loads(ledger.read_text().splitlines()[-1]) if ledger.exists() else None
        return {
            "command": command_of(chapter),
            "code": process.returncode,
            "seconds": round(seconds, 1),
            "result": line["result"] if line else _result(folder, process.returncode),
            "ledger": line and {key: value for key, value in line.items() if key != "machine"},
            "said": without_paths((folder / "said.txt").read_text(), folder, sys.executable).splitlines(),
        }


def _result(folder: Path, code: int) -> str:
    """Of a command that leaves no line in the ledger: how its run ended, or that its sides cannot be compared."""
    reports = sorted((folder / "reports").glob("2*/report.json"))
    if not reports:
        return NOT_COMPARABLE if code == 2 else f"exit {code}"
    outcome = next(one for one in json.loads(reports[-1].read_text())["outcomes"] if one["final"])
    return " ".join(part for part in (outcome["verdict"], outcome["cause"]) if part)


def page(known: Mapping[str, Any]) -> list[str]:
    """docs/case-study.md: what was believed as a table, then each command with what it said."""
    told = [(chapter, known["chapters"][chapter.name]) for chapter in CHAPTERS if chapter.name in known["chapters"]]
    minutes = sum(seen["seconds"] for _, seen in told) / 60
    versions = known["versions"]
    return [
        "# Case study: two weeks of hangs",
        "",
        "```text",
        "nsa-harness run seed_token_loop",
        "nsa-harness claim seed_token_loop parallel.wrapper=ddp,manual --text='DDP is the cause'",
        "```",
        "",
        "A team trained a 125M model with Native Sparse Attention, and its first step never seemed to end. In two",
        "weeks it named six causes, none with a control run. Most of it was slow and not stuck: a loop over tokens.",
        "One failure was real and had nothing to do with it. Here both are planted into nsa.train, and what was",
        "believed is tested:",
        f"{len(told)} commands, {minutes:.0f} minutes on {known['cpus']} cores without a GPU (torch"
        f" {versions['torch']}, Python {versions['python']}).",
        "",
        "`tools/case_study.py` ran them and made this page; the records are in `benchmarks/results/case_study.json`.",
        "",
        "| asked | answer | without it | with it | runs | minutes |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(_row(chapter, seen) for chapter, seen in told),
        "",
        "Failed runs of each side. A mitigation is refuted where it takes away less than half of the failures.",
        *_told_in_the_end(known["chapters"]),
        *(line for chapter, seen in told for line in _section(chapter, seen)),
    ]


def _told_in_the_end(seen: Mapping[str, Any]) -> Iterator[str]:
    if not {"symptom", "loop", "ready_twice"} <= seen.keys():
        return
    first, control, real = (seen[name]["seconds"] for name in ("symptom", "loop", "ready_twice"))
    refuted = [one["seconds"] for one in seen.values() if one["result"] == REFUTED]
    yield ""
    yield from textwrap.wrap(
        f"The first command names the loop after {first:.0f} s; the control that proves it takes {control / 60:.1f}"
        f" minutes more. The failure that was real has its line after {real:.0f} s. The other {sum(refuted) / 60:.0f}"
        f" minutes go into the {len(refuted)} beliefs that the team held meanwhile. NCCL cannot be tested on a machine"
        " without GPUs, and that is said in place of an answer.",
        118,
    )


def _row(chapter: Chapter, seen: Mapping[str, Any]) -> str:
    line, minutes = seen["ledger"], seen["seconds"] / 60
    if line is None:
        runs = 1 if chapter.words[0] == "run" else 0
        return f"| {_linked(chapter)} | {_answer(seen)} | | | {runs} | {minutes:.1f} |"
    counts = [f"{side['failed']} of {side['of']}" for side in line["sides"]]
    return f"| {_linked(chapter)} | {_answer(seen)} | {counts[0]} | {counts[1]} | {line['attempts']} | {minutes:.1f} |"


def _linked(chapter: Chapter) -> str:
    return f"[{chapter.title}](#{chapter.title.lower().replace(' ', '-')})"


def _answer(seen: Mapping[str, Any]) -> str:
    return "not tested here" if seen["result"] == NOT_COMPARABLE else f"**{seen['result']}**"


def _section(chapter: Chapter, seen: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"## {chapter.title}", "", *textwrap.wrap(chapter.told, 118), "")
    yield from ("```console", f"$ {seen['command']}", *(line.rstrip() for line in seen["said"]), "```")


if __name__ == "__main__":
    main()
