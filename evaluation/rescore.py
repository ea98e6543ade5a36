"""Rescores everything that is stored, and compares it with what is committed: the scores, the answers, the pages.

The recordings of strangers' programs are judged again by the rules of this commit. The other experiments have stored
answers, no evidence: their answers are compared with the truths again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluation import bisections, calibration, case_study, corpus, explanations, plan_truth, strangers, twelve
from evaluation.experiments import HOME, PAGES, Experiment
from evaluation.scoring import Row, paragraph, table

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (twelve, bisections, plan_truth, case_study, calibration)
}
COMMITTED = HOME / "results" / "scores.json"
ACCURACY_HEAD = [
    "# Accuracy",
    "",
    "```text",
    "python -m evaluation score",
    "```",
    "",
    *paragraph(
        """
        This page shows how often nsa-harness was right about programs whose faults are known. The first section is
        the best estimate for your own programs, because the rules of nsa-harness were written without these programs.
        All later sections are regression tests. The command above compares this page with the stored results in
        `evaluation/`; with `--write` it rebuilds the page.
        """
    ),
    "",
]


def main(*, write: bool) -> int:
    """Print the table and each thing that is not as committed, or write it. Return 1 if something differs."""
    scores, answers = scored()
    print("\n".join(table(scores)))
    print("\nfirst sight: the answers of the first run; today: what the rules of this commit say of its recordings")
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {"scores": {}, "answers": {}}
    different = [*differences(scores, committed["scores"]), *changed(answers, committed["answers"])]
    pages = documents()
    different += [
        f"{path.relative_to(HOME.parent)} differs from the evidence: python -m evaluation score --write"
        for path in stale(pages)
    ]
    print("\n".join(["", *different]) if different else "\nScores, answers and pages are as committed.")
    if write:
        COMMITTED.write_text(text_of(scores, answers))
        for path, text in pages.items():
            path.write_text(text)
    return 1 if different and not write else 0


def scored() -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows of the table, and what today's rules say of each recording, by ROUND/PROGRAM."""
    rows: dict[str, Row] = {}
    answers: dict[str, str] = {}
    for home in strangers.rounds():
        now = strangers.answers_of_today(home)
        answers |= {f"{home.name}/{program}": strangers.short(now[program]) for program in sorted(now)}
        for when, some in (("first sight", strangers.answers_in(home)), ("today", now)):
            judged = strangers.rows_of(home, some)
            counts = strangers.figures(judged)
            counts["certain and wrong"] = counts["certain and wrong"].partition(" (")[0]
            rows[f"{home.name}, {when}"] = {"cases": str(len(judged)), **counts}
    for experiment in EXPERIMENTS.values():
        rows |= experiment.rows(experiment.load())
    return rows | corpus.rows(corpus.load()), answers


def differences(rows: dict[str, Row], committed: dict[str, Row]) -> Iterator[str]:
    for name in dict.fromkeys((*rows, *committed)):
        now, before = rows.get(name, {}), committed.get(name, {})
        for column in dict.fromkeys((*now, *before)):
            if now.get(column) != before.get(column):
                yield f"{name}: {column} is {now.get(column, '-')}, committed is {before.get(column, '-')}"


def changed(answers: dict[str, str], committed: dict[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*answers, *committed)):
        if answers.get(name) != committed.get(name):
            yield f"{name}: says {answers.get(name, '-')}, committed is {committed.get(name, '-')}"


def text_of(scores: dict[str, Row], answers: dict[str, str]) -> str:
    return json.dumps({"scores": scores, "answers": answers}, indent=1, ensure_ascii=False) + "\n"


def documents() -> dict[Path, str]:
    """Every page that is made from results, with its text."""
    loaded: dict[str, Any] = {name: experiment.load() for name, experiment in EXPERIMENTS.items()}
    accuracy = [
        *ACCURACY_HEAD,
        *strangers.section(),
        *explanations.section(),
        *twelve.section(loaded["twelve"]),
        *bisections.section(loaded["bisections"]),
        *plan_truth.section(loaded["plan_truth"]),
        *corpus.section(corpus.load()),
    ]
    return {
        PAGES / "accuracy.md": "\n".join(accuracy),
        PAGES / "case-study.md": "\n".join(case_study.page(loaded["case_study"])),
        PAGES / "calibration.md": "\n".join(calibration.page(loaded["calibration"])),
        PAGES / "calibration.svg": calibration.picture(calibration.results_of(loaded["calibration"]["cells"])),
    }


def stale(pages: dict[Path, str]) -> list[Path]:
    return [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
