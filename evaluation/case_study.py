"""The case study: what a team believed during two weeks of hangs, each belief tested by one command.

Each chapter is one command of truth/case_study.toml. Its output, its line of the ledger and its outcome are stored, and
the page takes every number from them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evaluation.experiments import Cell, Experiment, Results, truths_of
from evaluation.launching import Ran, harness, scratch, without_paths
from evaluation.plan_truth import REFUTED, ending
from evaluation.scoring import Row, paragraph

LIMIT_S = 1800.0
NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One command, what was believed when it would have helped, and how it must end."""

    name: str
    title: str
    told: str  # what the team saw or believed, and from where
    words: tuple[str, ...]
    right: str  # result of a claim, or verdict and cause of a run

    @property
    def command(self) -> str:
        return shlex.join(["nsa-harness", *self.words])


def read(name: str, stored: Mapping[str, str]) -> Chapter:
    told, words = " ".join(stored["told"].split()), tuple(shlex.split(stored["words"]))
    return Chapter(name=name, title=stored["title"], told=told, words=words, right=stored["right"])


CHAPTERS = {name: read(name, stored) for name, stored in truths_of("case_study").items()}


def launch(case: str) -> dict[str, Any]:
    """Run the command, and return what it printed, how it ended, and what it added to the ledger."""
    with scratch() as place:
        ran = place.ran([harness(), *CHAPTERS[case].words], LIMIT_S)
        report = place.stored("report.json")
        ledger = place.folder / "reports" / "claims.jsonl"
        line = json.loads(ledger.read_text().splitlines()[-1]) if ledger.exists() else None
        return {
            "command": CHAPTERS[case].command,
            "code": ran.code,
            "seconds": round(ran.seconds, 1),
            "result": line["result"] if line else _result(report, ran),
            "ledger": line and {key: value for key, value in line.items() if key != "machine"},
            "said": without_paths(ran.output, place.folder).splitlines(),
        }


def _result(report: Mapping[str, Any] | None, ran: Ran) -> str:
    """Return how the run of a command ended that left no line in the ledger, or that its sides cannot be compared."""
    if report is None:
        return NOT_COMPARABLE if ran.code == 2 else f"exit {ran.code}"
    return ending(next(outcome for outcome in report["outcomes"] if outcome["final"]))


def describe(case: str, cell: Cell) -> str:
    right = cell["result"] == CHAPTERS[case].right
    verdict = "right" if right else f"{cell['result']}, expected {CHAPTERS[case].right}"
    return f"{verdict}   {cell['seconds']:.0f} s"


def _seen(results: Results) -> list[tuple[Chapter, Cell]]:
    seen = results["chapters"]
    return [(chapter, seen[name]) for name, chapter in CHAPTERS.items() if name in seen]


def rows(results: Results) -> dict[str, Row]:
    seen = _seen(results)
    right = sum(cell["result"] == chapter.right for chapter, cell in seen)
    return {"case study": {"cases": str(len(seen)), "answer": f"{right} of {len(seen)}"}}


EXPERIMENT = Experiment(
    name="case_study",
    cases=tuple(CHAPTERS),
    launch=launch,
    describe=describe,
    rows=rows,
    fingerprint=lambda case: {"command": CHAPTERS[case].command},
    key="chapters",
)


def page(results: Results) -> list[str]:
    """Return the lines of case-study.md: a table of all commands, then each command with the answer it printed."""
    seen = _seen(results)
    minutes = sum(cell["seconds"] for _, cell in seen) / 60
    versions = results["versions"]
    return [
        "# Case study: two weeks of hangs",
        "",
        "```text",
        "nsa-harness run seed_token_loop",
        "nsa-harness claim seed_token_loop parallel.wrapper=ddp,manual --text='DDP is the cause'",
        "```",
        "",
        *paragraph(
            """
            A team trained a model of 125 million parameters with Native Sparse Attention, and the first step never
            seemed to end. In two weeks the team suspected six causes, without a control run for any of them. Most of
            the time nothing was stuck: a Python loop over tokens made each step very slow. One other failure was real
            and had a different cause.
            """
        ),
        "",
        *paragraph(
            f"""
            Here both faults are planted into the training program of this project, and each belief of the team is
            tested. This takes {len(seen)} commands and {minutes:.0f} minutes on {results["cpus"]} cores without a GPU
            (torch {versions["torch"]}, Python {versions["python"]}). `python -m evaluation run case_study` repeats
            the commands. This page shows the answers; `evaluation/results/case_study.json` contains the full output.
            """
        ),
        "",
        "| question | answer | failed without the change | failed with the change | runs | minutes |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(_row(chapter, cell) for chapter, cell in seen),
        "",
        *paragraph(
            """
            `nsa-harness claim` runs a program alternately without and with one change. It refutes the claim if the
            change removes less than half of the failures, and it supports the claim if runs with the change fail less
            often. For "DDP is the cause", the change is to train without DDP.
            """
        ),
        *_conclusion(results["chapters"]),
        *(line for chapter, cell in seen for line in _section(chapter, cell)),
        "",
    ]


def _conclusion(seen: Mapping[str, Cell]) -> Iterator[str]:
    """Yield the paragraph that says which commands took how long, or nothing if one of them was not run."""
    if not {"symptom", "loop", "ready_twice"} <= seen.keys():
        return
    first, control, real = (seen[name]["seconds"] for name in ("symptom", "loop", "ready_twice"))
    refuted = [cell["seconds"] for cell in seen.values() if cell["result"] == REFUTED]
    yield ""
    yield from paragraph(
        f"""
        The first command names the loop after {first:.0f} s, and the control run that proves it takes
        {control / 60:.1f} minutes more. The command for the real failure names its line after {real:.0f} s. The other
        {sum(refuted) / 60:.0f} minutes refute {len(refuted)} beliefs of the team. NCCL cannot be tested on a machine
        without GPUs; nsa-harness reports that instead of an answer.
        """
    )


def _row(chapter: Chapter, cell: Cell) -> str:
    line, minutes = cell["ledger"], cell["seconds"] / 60
    link = f"[{chapter.title}](#{chapter.title.lower().replace(' ', '-')})"
    answer = "not tested here" if cell["result"] == NOT_COMPARABLE else f"**{cell['result']}**"
    if line is None:
        runs = 1 if chapter.words[0] == "run" else 0
        return f"| {link} | {answer} | | | {runs} | {minutes:.1f} |"
    counts = [f"{side['failed']} of {side['of']}" for side in line["sides"]]
    return f"| {link} | {answer} | {counts[0]} | {counts[1]} | {line['attempts']} | {minutes:.1f} |"


def _section(chapter: Chapter, cell: Cell) -> Iterator[str]:
    yield from ("", f"## {chapter.title}", "", *paragraph(chapter.told), "")
    yield from ("```console", f"$ {cell['command']}", *_answer(chapter, cell), "```")


def _answer(chapter: Chapter, cell: Cell) -> Iterator[str]:
    """Yield the lines of the output that answer the question: the answer of a run, or the result of a claim."""
    lines = [line.rstrip() for line in cell["said"]]
    starts = (cell["result"].split()[0].upper(), NOT_COMPARABLE)
    start = next(number for number, line in enumerate(lines) if line.startswith(starts))
    ends_early = chapter.words[0] == "claim" and "" in lines[start:]
    yield from lines[start : lines.index("", start) if ends_early else len(lines)]
