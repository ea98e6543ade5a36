"""`selftest`: planted faults, and the programs of the corpus, run as any scenario is and compared with their labels."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TextIO, TypeVar

from nsa_harness.commands.run import run_all
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Report
from nsa_harness.core.schedule import Policy
from nsa_harness.core.selftest.corpus import (
    FAULT,
    HEALTHY,
    Label,
    Trial,
    TrialResult,
    accuracy_lines,
    accuracy_values,
    read_label,
    trial_line,
    trial_result,
    trials,
)
from nsa_harness.core.selftest.selftest import (
    LAYERS,
    SELFTEST_FAULTS,
    Planting,
    PlantingResult,
    SelftestFault,
    planted,
    planting_line,
    planting_result,
    score_lines,
    score_values,
    words_of,
)
from nsa_harness.errors import UsageError, did_you_mean
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.listener import Listener
from nsa_harness.render.text import escape
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script
from nsa_harness.supervisor.launch.planning import planned as planned_specs
from nsa_harness.supervisor.launch.scenario_files import shipped_root
from nsa_harness.supervisor.storage.reports import MOST_BYTES
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions

_RIGHT, _WRONG, _INTERRUPTED = 0, 1, 130
_PARENT = "base/fault.yaml"
_PACKAGE = Path(__file__).resolve().parents[1]
_CORPUS_DEADLINE_S = 120.0

Asked = TypeVar("Asked", Trial, Planting)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SelftestRequest:
    full: bool  # every fault and every twin, and the corpus; else the quick ones
    score: bool  # the score as JSON on stdout, and all lines on stderr
    seed: int  # decides every place
    programs: tuple[str, ...] = ()  # of the corpus, by name or glob, and nothing else
    out: Path | None
    command: str  # as typed


@dataclass(frozen=True, kw_only=True)
class CorpusRequest:
    root: Path
    out: Path | None
    command: str  # as typed
    jobs: int = 1  # runs at the same time


def drawn(kinds: Iterable[SelftestFault], seed: int) -> tuple[Planting, ...]:
    """Each fault and its twin, at a place that no rule can have learnt."""
    return tuple(planting for kind in kinds for planting in _at_a_place(kind, seed))


def selftest(request: SelftestRequest, kinds: Iterable[SelftestFault] = SELFTEST_FAULTS) -> int:
    """0 if every part of every report is right, 1 if not, 130 if it was interrupted. Raises UsageError."""
    root = corpus_root()
    wanted = chosen(corpus(root), request.programs) if request.programs or request.full else ()
    planted = [] if request.programs else [one for one in drawn(kinds, request.seed) if request.full or one.quick]
    people = sys.stderr if request.score else sys.stdout
    programs = _possible(wanted, people)
    code, marks, run_dir = _planted_runs(planted, request, people)
    answers = [] if code == _INTERRUPTED else _corpus_runs(programs, root, request, people)
    if request.score:
        values = score_values(marks, seed=request.seed)
        print(json.dumps({**values, "corpus": accuracy_values(answers), "run_dir": str(run_dir)}, indent=1))
    if code == _INTERRUPTED or len(answers) < len(programs):
        return _INTERRUPTED
    wrong = [*(mark.wrong for mark in marks), *(answer.wrong for answer in answers)]
    return _RIGHT if len(marks) == len(planted) and not any(wrong) else _WRONG


def _planted_runs(
    plantings: Sequence[Planting], request: SelftestRequest, people: TextIO
) -> tuple[int, list[PlantingResult], Path | None]:
    if not plantings:
        return _RIGHT, [], None
    print(_head(plantings, request), file=people, flush=True)
    lines = _Lines(_line(plantings, planting_result, planting_line), people)
    specs = tuple(_spec(planting) for planting in plantings)
    code = run_all(RunRequest(specs=specs, options=_options(request)), lines)
    marks = _results(plantings, planting_result, lines.run_dir)
    print("\n".join(_end(marks, plantings, lines.run_dir)), file=people)
    if request.score:
        print("\n".join(score_lines(marks)), file=people)
    return code, marks, lines.run_dir


def _options(request: SelftestRequest | CorpusRequest) -> RunOptions:
    return RunOptions(out=request.out, strict=True, command=request.command)


def _possible(programs: Iterable[Trial], people: TextIO) -> tuple[Trial, ...]:
    """Those that this machine can run; of the others it is said what is missing."""
    lacks = {trial: lacking(trial) for trial in programs}
    for trial, lack in lacks.items():
        if lack is not None:
            print(f"SKIP   {trial.name}  needs {lack}", file=people)
    return tuple(trial for trial, lack in lacks.items() if lack is None)


def _corpus_runs(programs: Sequence[Trial], root: Path, request: SelftestRequest, people: TextIO) -> list[TrialResult]:
    if not programs:
        return []
    print(f"corpus     {len(programs)} programs of {root}", file=people, flush=True)
    wanted = CorpusRequest(root=root, out=request.out, command=request.command)
    answers = [answer for some in run_corpus(programs, wanted, people).values() for answer in some]
    print(f"{sum(not one.wrong for one in answers)} of {len(programs)} right", file=people)
    if request.score:
        print("\n".join(accuracy_lines(answers)), file=people)
    return answers


class _Lines(Listener):
    """In place of the terminal: one line an outcome as it is judged, or at the end, where one attempt says nothing."""

    def __init__(self, line: Callable[[Outcome], str], people: TextIO, *, at_the_end: bool = False) -> None:
        self.run_dir: Path | None = None
        self._line = line
        self._people = people
        self._at_the_end = at_the_end

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self.run_dir = run_dir
        if not self._at_the_end:
            self._say(outcome)

    def done(self, report: Report, run_dir: Path) -> None:
        self.run_dir = run_dir
        for outcome in report.outcomes if self._at_the_end else ():
            if outcome.final:
                self._say(outcome)

    def _say(self, outcome: Outcome) -> None:
        print(escape(self._line(outcome)), file=self._people, flush=True)


def corpus_root() -> Path:
    """Inside an installed wheel, or in the repository this package is run from."""
    inside = _PACKAGE / "_corpus"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "tests" / "faults"


def corpus(root: Path) -> tuple[Trial, ...]:
    """Every program, each fault followed by its twin. Raises UsageError for a label that is wrong."""
    return trials(tuple(_label(path) for path in sorted(root.glob("[a-z]*.py"))))


def run_corpus(chosen: Sequence[Trial], request: CorpusRequest, people: TextIO) -> dict[Path, list[TrialResult]]:
    """Run each trial once, or as often as its label wants; by run directory, what was said of each.

    Fewer answers than trials: it was interrupted.
    """
    answers: dict[Path, list[TrialResult]] = {}
    for repeat, together in groupby(sorted(chosen, key=_repeat), key=_repeat):
        some = tuple(together)
        lines = _Lines(_line(some, trial_result, trial_line), people, at_the_end=repeat > 1)
        run = RunRequest(
            specs=tuple(_trial_spec(trial, request.root) for trial in some),
            options=_options(request),
            policy=Policy(repeat=repeat),
            jobs=request.jobs,
        )
        code = run_all(run, lines)
        if lines.run_dir is not None:
            answers[lines.run_dir] = _results(some, trial_result, lines.run_dir)
        if code == _INTERRUPTED:
            break
    return answers


def lacking(trial: Trial) -> str | None:
    """What this machine lacks for the trial, or None."""
    if "root" in trial.label.needs and os.geteuid() != 0:
        return "root"
    if "gpu" in trial.label.needs and not machine_facts().gpus:
        return "a GPU"
    return None


def chosen(programs: Iterable[Trial], patterns: Sequence[str]) -> tuple[Trial, ...]:
    """Those that any pattern names, each with its twin; a name that ends in `_healthy` is the twin alone."""
    programs = tuple(programs)
    wanted = [one for one in programs if not patterns or any(_named(one, pattern) for pattern in patterns)]
    known = sorted({one.label.name for one in programs})
    for pattern in patterns:
        if not any(_named(one, pattern) for one in programs):
            raise UsageError(f"the corpus has no program {pattern!r}{did_you_mean(pattern, known)}")
    return tuple(wanted)


def _named(trial: Trial, pattern: str) -> bool:
    return fnmatchcase(trial.name, pattern) or fnmatchcase(trial.label.name, pattern)


def _at_a_place(kind: SelftestFault, seed: int) -> tuple[Planting, Planting]:
    draw = random.Random(f"{seed} {kind.name}")
    rank, layer, step = draw.randrange(kind.ranks), draw.randrange(LAYERS), draw.randrange(1, kind.steps + 1)
    return planted(kind, rank=rank, layer=layer, step=step)


def _spec(planting: Planting) -> RunSpec:
    """By the path of every scenario: file, overrides, checks, machine. Neither ./scenarios nor NSA_ names reach it."""
    root = shipped_root()
    spec = _launch_of(Invocation(words=(str(root / _PARENT), *words_of(planting)), working_dir=root, environ={}))
    return replace(spec, scenario=planting.name, about=f"selftest: {planting.fault.kind} at {planting}")


def _launch_of(question: Invocation) -> RunSpec:
    (spec,) = planned_specs(question, machine_facts()).specs
    assert isinstance(spec, RunSpec)
    return spec


def _head(plantings: Sequence[Planting], request: SelftestRequest) -> str:
    faults = sum(planting.must_say.cause is not None for planting in plantings)
    return (
        f"selftest   {faults} planted faults, {len(plantings) - faults} healthy twins, seed {request.seed} "
        f"(--seed {request.seed} plants them at the same places)"
    )


def _end(marks: Sequence[PlantingResult], plantings: Sequence[Planting], run_dir: Path | None) -> Iterator[str]:
    right = sum(not mark.wrong for mark in marks)
    unfinished = len(plantings) - len(marks)
    yield f"{right} of {len(plantings)} right" + (f", {unfinished} not run" if unfinished else "")
    if run_dir is not None:
        yield f"report     {run_dir / 'SUMMARY.md'}"


def _label(path: Path) -> Label:
    try:
        return read_label(path.stem, path.read_text())
    except ValueError as error:
        raise UsageError(f"the corpus cannot be read: {error}") from None


def _repeat(trial: Trial) -> int:
    return trial.label.repeat


def _trial_spec(trial: Trial, root: Path) -> RunSpec:
    """By the path of any script on a command line."""
    label = trial.label
    limits = {"deadline_s": _CORPUS_DEADLINE_S, **label.limits}
    script = Script(
        file=str(root / f"{label.name}.py"),
        ranks=label.ranks,
        args=(HEALTHY if trial.healthy else FAULT, *label.words),
    )
    words = tuple(f"limits.{name}={value:g}" for name, value in limits.items())
    spec = _launch_of(Invocation(words=words, script=script, working_dir=root, environ={}))
    return replace(spec, scenario=trial.name, about=label.about, env=tuple(sorted(label.env.items())))


def _line(
    asked: Iterable[Asked], result: Callable[[Asked, Outcome], Result], line: Callable[[Result, int], str]
) -> Callable[[Outcome], str]:
    """What is said of an outcome once it is compared, in columns as wide as the longest name."""
    by_name = {one.name: one for one in asked}
    width = max(map(len, by_name), default=0)
    return lambda outcome: line(result(by_name[outcome.spec.scenario], outcome), width)


def _results(asked: Iterable[Asked], result: Callable[[Asked, Outcome], Result], run_dir: Path | None) -> list[Result]:
    """By the outcomes that count, from report.json, as any other program would read it."""
    if run_dir is None:
        return []
    run = RunDir(run_dir)
    text = run.door.whole(run.report, MOST_BYTES).decode("utf-8")
    outcomes = {one.spec.scenario: one for one in from_json(text, str(run.report)).outcomes if one.final}
    return [result(one, outcomes[one.name]) for one in asked if one.name in outcomes]
