"""The corpus of planted faults (tests/faults): run in slices, judged by this commit, counted cause by cause.

Every fault and every healthy program runs once, three runs at a time. The healthy programs run once more while other
processes want every core. What a run left stays in build/accuracy, with the commit it was made by; results/corpus.json
has what was said of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.provenance import measurement_context
from evaluation.experiments import HOME, REPOSITORY
from evaluation.scoring import Row, paragraph
from evaluation.trials import (
    CorpusRequest,
    Share,
    Trial,
    TrialResult,
    accuracy_values,
    corpus,
    corpus_root,
    lacking,
    run_corpus,
    trial_result,
)
from nsa_harness.commands.judge import judge_stored
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.supervisor.storage.rundir import RunDir

RESULTS = HOME / "results" / "corpus.json"
STORED = REPOSITORY / "build" / "accuracy"
BURNER = "while True: pass"
BURNERS = 2
JOBS = 3
BATCH = 8  # runs in one directory
CIRCUMSTANCES = ("quiet", "loaded")
_NAMED = ("verdict", "culprit", "cause", "line", "step")

Values = Mapping[str, Any]


class Stored:
    """The runs of one circumstance: by trial, the run's directory and the commit it was made by."""

    def __init__(self, circumstance: str) -> None:
        self.circumstance = circumstance
        self.home = STORED / circumstance
        self._index = self.home / "index.json"
        self.known: dict[str, dict[str, str]] = json.loads(self._index.read_text()) if self._index.exists() else {}

    def forget(self, glob: str) -> None:
        self._know({name: run for name, run in self.known.items() if not fnmatchcase(name, glob)})

    def not_run(self, trials: Sequence[Trial]) -> list[Trial]:
        return [trial for trial in trials if trial.name not in self.known]

    def run(self, batch: Sequence[Trial]) -> None:
        request = CorpusRequest(root=corpus_root(), out=self.home, command=" ".join(sys.argv), jobs=JOBS)
        with burning(BURNERS if self.circumstance == "loaded" else 0):
            ran = run_corpus(batch, request, sys.stdout)
        commit = measurement_context(__file__, [])["commit"]
        for run_dir, answers in ran.items():
            place = str(run_dir.resolve().relative_to(self.home))
            self._know(self.known | {answer.trial.name: {"run": place, "commit": commit} for answer in answers})
        if sum(map(len, ran.values())) < len(batch):
            raise SystemExit(130)

    def _know(self, known: dict[str, dict[str, str]]) -> None:
        self.known = known
        if self.home.is_dir():
            self._index.write_text(json.dumps(known, indent=1))

    def answer(self, trial: Trial) -> TrialResult:
        """Judge what a trial left on disk by the rules of this commit."""
        attempts = RunDir(self.home / self.known[trial.name]["run"]).attempts()
        judged = [judge_stored(attempt) for attempt in attempts if attempt.path.name.partition("~")[0] == trial.name]
        return trial_result(trial, with_flakiness(judged)[-1])


@contextmanager
def burning(processes: int) -> Iterator[None]:
    """Keep processes running that want a core each."""
    burners = [subprocess.Popen([sys.executable, "-c", BURNER]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(*, minutes: float, forget: Sequence[str], only: str = "", file: Path | None = None) -> Iterator[str]:
    """Run what has no run yet, begin no batch after so many minutes, and judge and store everything that has run.

    `only` is a glob of program names. The results of a part of the corpus are stored in `file` only, never with those
    of the whole.
    """
    until_s = time.monotonic() + 60 * minutes
    possible_here = [trial for trial in corpus(corpus_root()) if not lacking(trial) and _is_chosen(trial, only)]
    if only and not possible_here:
        raise SystemExit(f"no program of the corpus that runs here is named {only}")
    answers: dict[str, list[TrialResult]] = {}
    commits: set[str] = set()
    left = 0
    for circumstance in CIRCUMSTANCES:
        stored = Stored(circumstance)
        for glob in forget:
            stored.forget(glob)
        due = [trial for trial in possible_here if circumstance == "quiet" or trial.sound]
        while (batch := stored.not_run(due)[:BATCH]) and time.monotonic() < until_s:
            stored.run(batch)
        answers[circumstance] = [stored.answer(trial) for trial in due if trial.name in stored.known]
        commits |= {run["commit"] for run in stored.known.values()}
        left += len(due) - len(answers[circumstance])
    if not any(answers.values()):
        yield f"no run is stored in {STORED.relative_to(REPOSITORY)}; {left} to do"
        return
    values = {
        **measurement_context(__file__, []),
        "command": "python -m evaluation run corpus",
        "evidence_of_commits": sorted(commits),
        "runs_at_the_same_time": JOBS,
        **{circumstance: accuracy_values(some) for circumstance, some in answers.items()},
    }
    if only:
        yield from (_line(circumstance, answer) for circumstance, some in answers.items() for answer in some)
    if file is not None or not only:
        (file or RESULTS).write_text(json.dumps(values, indent=1) + "\n")
    yield f"{sum(map(len, answers.values()))} runs judged, {left} to do"


def _is_chosen(trial: Trial, only: str) -> bool:
    return not only or fnmatchcase(trial.name, only) or fnmatchcase(trial.label.name, only)


def _line(circumstance: str, answer: TrialResult) -> str:
    return f"{circumstance:<7} {answer.trial.name}: {'; '.join(answer.wrong) or 'right'}"


def load() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RESULTS.read_text())
    return values


def has_mistakes(values: Values) -> bool:
    return any(answer["wrong"] for circumstance in CIRCUMSTANCES for answer in values[circumstance]["answers"])


def rows(values: Values) -> dict[str, Row]:
    return {f"corpus, {circumstance}": _counted(values[circumstance]) for circumstance in CIRCUMSTANCES}


def _counted(values: Values) -> Row:
    """A row of the table, without the parts that no label asks for: the loaded programs are healthy."""
    rates = {"rank" if name == "culprit" else name: rate for name, rate in values["rates"].items() if rate["of"]}
    counts = {name: f"{rate['right']} of {rate['of']}" for name, rate in rates.items() if name != "step"}
    certain = values["calibration"]["certain"]["of"]
    sure = {"certain and wrong": f"{len(values['certain_and_wrong'])} of {certain}"} if certain else {}
    false = f"{len(values['false_hangs'])} of {sum(map(_is_sound, values['answers']))}"
    return {"cases": str(len(values["answers"])), **counts, **sure, "false HANG": false}


def _is_sound(answer: Values) -> bool:
    """Whether nothing is wrong with the program: it must pass, and nothing may be said against it."""
    return answer["due"]["verdict"] == "PASS" and answer["due"]["cause"] is None


def section(values: Values) -> list[str]:
    """Return the last sections of accuracy.md: the results for the programs of tests/faults."""
    quiet, loaded = (values[circumstance] for circumstance in CIRCUMSTANCES)
    sound = [answer for side in (quiet, loaded) for answer in side["answers"] if _is_sound(answer)]
    hangs, alarms = ([*quiet[key], *loaded[key]] for key in ("false_hangs", "false_alarms"))
    wrong = [answer for answer in quiet["answers"] if answer["wrong"]]
    named = f" ({', '.join(alarms)})" if alarms else ""
    return [
        "## The project's own programs",
        "",
        *paragraph(
            f"""
            The rules were written with the programs in `tests/faults` in view. The table
            covers {len(quiet["answers"])} runs, three at a time, and {len(loaded["answers"])} runs of healthy
            programs under load, with torch {values["versions"]["torch"]}, gloo and {values["cpus"]} cores, on
            {values["date"][:10]}. The expected answers and the rules are those of commit {values["commit"][:7]};
            causes that were added later count under their earlier names.
            """
        ),
        "",
        "| part of the report | right |",
        "| --- | ---: |",
        *(f"| {name} | {_share(quiet['rates'][name])} |" for name in _NAMED),
        "",
        f"Of {len(sound)} runs of healthy programs, {len(loaded['answers'])} of them under load, {len(hangs)} were"
        f" reported as HANG, and {len(alarms)} had a finding that reported a fault{named}.",
        "",
        "## Confidence",
        "",
        "The table shows how often cause and culprit were both right, for each confidence that the report states.",
        "",
        "| confidence | right |",
        "| --- | ---: |",
        *(f"| {name} | {_share(share)} |" for name, share in quiet["calibration"].items()),
        "",
        f"The median time from the last progress of the culprit to the HANG verdict is"
        f" {_s(quiet['hang_detected_s']['median'])}; 95 % of the verdicts came within"
        f" {_s(quiet['hang_detected_s']['p95'])}.",
        "",
        "## Results by cause",
        "",
        "| cause | planted | reported | right | precision | recall |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(_row(cause, counts) for cause, counts in quiet["causes"].items()),
        "",
        "## Wrong answers",
        "",
        *([_mistake(answer) for answer in wrong] or ["There are none."]),
        "",
    ]


def _share(values: Values) -> str:
    return str(Share(right=values["right"], of=values["of"]))


def _row(cause: str, counts: Values) -> str:
    precision, recall = ("-" if counts[key] is None else f"{counts[key]:.2f}" for key in ("precision", "recall"))
    return f"| {cause} | {counts['planted']} | {counts['said']} | {counts['right']} | {precision} | {recall} |"


def _mistake(answer: Values) -> str:
    due, said = (" ".join(filter(None, (answer[key]["verdict"], answer[key]["cause"]))) for key in ("due", "said"))
    return f"- `{answer['name']}`: expected {due}, reported {said}; wrong {', '.join(answer['wrong'])}."


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
