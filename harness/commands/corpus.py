"""The corpus: programs with a known fault each, run as any script of a user is, and compared with their labels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TextIO

from nsa_harness.commands.request import RunRequest
from nsa_harness.commands.run import run_all
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Report
from nsa_harness.core.schedule import Policy
from nsa_harness.core.selftest.corpus import (
    FAULT,
    HEALTHY,
    Answer,
    Label,
    Trial,
    answer_line,
    answered,
    read_label,
    trials,
)
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.listener import Silent
from nsa_harness.render.text import escape
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script
from nsa_harness.supervisor.launch.planning import planned as planned_specs
from nsa_harness.supervisor.store.rundir import RunDir

_PACKAGE = Path(__file__).resolve().parents[1]
_DEADLINE_S = 120.0
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class CorpusRequest:
    root: Path
    out: Path | None
    command: str  # as typed
    jobs: int = 1  # runs at the same time


def corpus_root() -> Path:
    """Inside an installed wheel, or in the repository this package is run from."""
    inside = _PACKAGE / "_corpus"
    return inside if inside.is_dir() else _PACKAGE.parent / "tests" / "faults"


def corpus(root: Path) -> tuple[Trial, ...]:
    """Every program, each fault followed by its twin. Raises UsageError for a label that is wrong."""
    return trials(tuple(_label(path) for path in sorted(root.glob("[a-z]*.py"))))


def run_corpus(chosen: Sequence[Trial], request: CorpusRequest, people: TextIO) -> dict[Path, list[Answer]]:
    """Run each trial once, or as often as its label wants; by run directory, what was said of each.

    Fewer answers than trials: it was interrupted.
    """
    answers: dict[Path, list[Answer]] = {}
    for repeat, together in groupby(sorted(chosen, key=_repeat), key=_repeat):
        some = tuple(together)
        lines = _Lines(some, people)
        code = run_all(_run_request(some, request, repeat), lines)
        if lines.run_dir is not None:
            answers[lines.run_dir] = list(_answers(some, lines.run_dir))
        if code == _INTERRUPTED:
            break
    return answers


class _Lines(Silent):
    """In place of the terminal: one line a trial, as it is judged."""

    def __init__(self, some: Sequence[Trial], people: TextIO) -> None:
        self.run_dir: Path | None = None
        self._by_name = {trial.name: trial for trial in some}
        self._width = max(map(len, self._by_name), default=0)
        self._people = people

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self.run_dir = run_dir
        trial = self._by_name[outcome.scenario]
        if trial.label.repeat == 1:  # else one attempt alone says nothing
            print(escape(answer_line(answered(trial, outcome), self._width)), file=self._people, flush=True)

    def done(self, report: Report, run_dir: Path) -> None:
        self.run_dir = run_dir
        for outcome in report.outcomes:
            trial = self._by_name[outcome.scenario]
            if trial.label.repeat > 1 and outcome.final:
                print(escape(answer_line(answered(trial, outcome), self._width)), file=self._people, flush=True)


def _label(path: Path) -> Label:
    try:
        return read_label(path.stem, path.read_text())
    except ValueError as error:
        raise UsageError(f"the corpus cannot be read: {error}") from None


def _repeat(trial: Trial) -> int:
    return trial.label.repeat


def _run_request(some: Iterable[Trial], request: CorpusRequest, repeat: int) -> RunRequest:
    return RunRequest(
        specs=tuple(_spec(trial, request.root) for trial in some),
        out=request.out,
        json=False,
        strict=True,
        probe="full",
        command=request.command,
        policy=Policy(repeat=repeat),
        jobs=request.jobs,
    )


def _spec(trial: Trial, root: Path) -> RunSpec:
    """By the path of any script on a command line."""
    label = trial.label
    limits = {"deadline_s": _DEADLINE_S, **label.limits}
    script = Script(
        file=str(root / f"{label.name}.py"),
        ranks=label.ranks,
        args=(HEALTHY if trial.healthy else FAULT, *label.words),
    )
    words = tuple(f"limits.{name}={value:g}" for name, value in limits.items())
    question = Invocation(words=words, script=script, working_dir=root, environ={})
    (spec,) = planned_specs(question, machine_facts()).specs
    assert isinstance(spec, RunSpec)
    return replace(spec, scenario=trial.name, about=label.about, env=tuple(sorted(label.env.items())))


def _answers(some: Iterable[Trial], run_dir: Path | None) -> Iterator[Answer]:
    """From report.json, as any other program would read it."""
    if run_dir is None:
        return
    stored = RunDir(run_dir).report
    outcomes = {
        outcome.scenario: outcome for outcome in from_json(stored.read_text(), str(stored)).outcomes if outcome.final
    }
    for trial in some:
        if trial.name in outcomes:
            yield answered(trial, outcomes[trial.name])


def lacking(trial: Trial) -> str | None:
    """What this machine lacks for the trial, or None."""
    if "root" in trial.label.needs and os.geteuid() != 0:
        return "root"
    if "gpu" in trial.label.needs and not machine_facts().gpus:
        return "a GPU"
    return None
