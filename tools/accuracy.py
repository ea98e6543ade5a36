"""Runs the corpus of faults in slices, judges all of it with this commit, and writes docs/accuracy.md.

    python tools/accuracy.py                  until every program has run, with and without load
    python tools/accuracy.py --minutes 30     one slice; the same command goes on where it stopped
    python tools/accuracy.py --minutes 0      judge what has run, with the rules of this commit
    python tools/accuracy.py --forget 'io_*'  what matches has not run

Every fault and every healthy program runs once, three runs at a time; the healthy ones run once more while other
processes want every core. What a run left behind stays in build/accuracy, with the commit it was made by.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.circumstances import circumstances  # noqa: E402
from evaluation.trials import (  # noqa: E402
    CorpusRequest,
    Trial,
    TrialResult,
    accuracy,
    accuracy_values,
    corpus,
    corpus_root,
    lacking,
    run_corpus,
    trial_result,
)
from nsa_harness.commands.judge import judge_stored  # noqa: E402
from nsa_harness.core.experiment.repeats import with_flakiness  # noqa: E402
from nsa_harness.supervisor.storage.rundir import RunDir  # noqa: E402
from tools.strangers import first_sight  # noqa: E402
from tools.twelve import write_page  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "accuracy.json"
DOCUMENT = REPOSITORY / "docs" / "accuracy.md"
STORED = REPOSITORY / "build" / "accuracy"
BURNER = "while True: pass"
BURNERS = 2
JOBS = 3
BATCH = 8  # runs in one directory
CIRCUMSTANCES = ("quiet", "loaded")


class Stored:
    """What has run under one circumstance: by trial, its run directory and the commit it was made by."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.home = STORED / how
        self._index = self.home / "index.json"
        self.known: dict[str, dict[str, str]] = json.loads(self._index.read_text()) if self._index.exists() else {}

    def forget(self, glob: str) -> None:
        self._know({name: one for name, one in self.known.items() if not fnmatchcase(name, glob)})

    def run(self, batch: Sequence[Trial]) -> None:
        request = CorpusRequest(root=corpus_root(), out=self.home, command=" ".join(sys.argv), jobs=JOBS)
        with burning(BURNERS if self.how == "loaded" else 0):
            ran = run_corpus(batch, request, sys.stdout)
        commit = circumstances(__file__, [])["commit"]
        for run_dir, answers in ran.items():
            place = str(run_dir.resolve().relative_to(self.home))
            self._know(self.known | {one.trial.name: {"run": place, "commit": commit} for one in answers})
        if sum(map(len, ran.values())) < len(batch):
            raise SystemExit(130)

    def _know(self, known: dict[str, dict[str, str]]) -> None:
        self.known = known
        if self.home.is_dir():
            self._index.write_text(json.dumps(known, indent=1))

    def answer(self, trial: Trial) -> TrialResult:
        """From what lies on disk, by the rules of this commit."""
        attempts = RunDir(self.home / self.known[trial.name]["run"]).attempts()
        judged = [judge_stored(one) for one in attempts if one.path.name.partition("~")[0] == trial.name]
        return trial_result(trial, with_flakiness(judged)[-1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the corpus of faults, in slices, and write docs/accuracy.md.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no program after this long")
    parser.add_argument("--forget", metavar="GLOB", action="append", default=[], help="what matches has not run")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    possible_here = [one for one in corpus(corpus_root()) if not lacking(one)]
    answers: dict[str, list[TrialResult]] = {}
    left = 0
    for how in CIRCUMSTANCES:
        stored = Stored(how)
        for glob in options.forget:
            stored.forget(glob)
        due = [one for one in possible_here if how == "quiet" or one.sound]
        while (batch := [one for one in due if one.name not in stored.known][:BATCH]) and time.monotonic() < until:
            stored.run(batch)
        answers[how] = [stored.answer(one) for one in due if one.name in stored.known]
        left += len(due) - len(answers[how])
    write(answers, evidence_of())
    print(f"{sum(map(len, answers.values()))} runs judged, {left} to do")
    return 1 if any(one.wrong for some in answers.values() for one in some) else 0


def evidence_of() -> list[str]:
    """The commits that the runs were made by."""
    return sorted({one["commit"] for how in CIRCUMSTANCES for one in Stored(how).known.values()})


@contextmanager
def burning(processes: int) -> Iterator[None]:
    """So many processes that want a core each."""
    burners = [subprocess.Popen([sys.executable, "-c", BURNER]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def write(answers: dict[str, list[TrialResult]], commits: Sequence[str]) -> None:
    values = {
        **circumstances(__file__, []),
        "evidence_of_commits": commits,
        "runs_at_the_same_time": JOBS,
        **{how: accuracy_values(some) for how, some in answers.items()},
    }
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    DOCUMENT.write_text(document(answers["quiet"], answers["loaded"], values))
    write_page()


def document(quiet: Sequence[TrialResult], loaded: Sequence[TrialResult], values: dict[str, Any]) -> str:
    found, under_load = accuracy(quiet), accuracy(loaded)
    sound = [one for one in (*quiet, *loaded) if one.trial.sound]
    hangs = [*found.false_hangs, *under_load.false_hangs]
    alarms = [*found.false_alarms, *under_load.false_alarms]
    wrong = [one for one in quiet if one.wrong]
    lines = [
        "# Accuracy",
        "",
        *first_sight(),
        f"How often the harness is right about the programs of `tests/faults`: {len(quiet)} runs, three at a time, and"
        f" {len(loaded)} under load; torch {values['versions']['torch']}, gloo, {values['cpus']} cores,"
        f" {values['date'][:10]}.",
        "Written by `python tools/accuracy.py`, from `benchmarks/results/accuracy.json`.",
        f"Labels and rules are those of commit {values['commit'][:7]}: a cause named since then counts"
        " as what it was before.",
        "",
        "| part of the report | right |",
        "| --- | ---: |",
        *(f"| {name} | {getattr(found, name)} |" for name in ("verdict", "culprit", "cause", "line", "step")),
        "",
        f"Of {len(sound)} runs with nothing wrong, {len(loaded)} of them under load, {len(hangs)} were called HANG and"
        f" {len(alarms)} had a finding held against them{_named(alarms)}.",
        "",
        "## How sure, and how right",
        "",
        "Cause and culprit both right, by the word that the report puts beside the cause.",
        "",
        "| the report says | and is right |",
        "| --- | ---: |",
        *(f"| {name} | {share} |" for name, share in found.bands.items()),
        "",
        f"A HANG is reported a median of {_s(found.latency_median_s)} after the culprit's last mark, 95 % within"
        f" {_s(found.latency_95_s)}.",
        "",
        "## Cause by cause",
        "",
        "| cause | planted | said | right | precision | recall |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {cause} | {one.planted} | {one.said} | {one.right} | {_rate(one.precision)} | {_rate(one.recall)} |"
            for cause, one in found.causes.items()
        ),
        "",
        "## What it gets wrong",
        "",
        *([_mistake(one) for one in wrong] or ["Nothing in this corpus."]),
        "",
    ]
    return "\n".join(lines)


def _mistake(one: TrialResult) -> str:
    label = one.trial.label
    due = f"{one.trial.due} {'' if one.trial.sound else label.cause or ''}".strip()
    said = f"{one.verdict} {one.cause or ''}".strip()
    return f"- `{one.trial.name}`: due {due}, said {said}; differs in {', '.join(one.wrong)}."


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
