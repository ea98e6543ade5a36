"""`selftest`: plants faults and their healthy twins, runs them as any scenario is run, and compares the report."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from nsa_harness.commands.corpus import CorpusRequest, corpus, corpus_root, lacking, run_corpus
from nsa_harness.commands.request import RunRequest
from nsa_harness.commands.run import run_all
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Report
from nsa_harness.core.selftest.accuracy import accuracy_lines, accuracy_values
from nsa_harness.core.selftest.corpus import Answer, Trial
from nsa_harness.core.selftest.selftest import (
    KINDS,
    LAYERS,
    Kind,
    Mark,
    Planting,
    mark_line,
    marked,
    planted,
    score_lines,
    score_values,
    twin,
    words_of,
)
from nsa_harness.core.suggest import did_you_mean
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.listener import Silent
from nsa_harness.render.text import escape
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.launch.planning import planned as planned_specs
from nsa_harness.supervisor.launch.scenario_files import shipped_root
from nsa_harness.supervisor.store.rundir import RunDir

_RIGHT, _WRONG, _INTERRUPTED = 0, 1, 130
_PARENT = "base/fault.yaml"


@dataclass(frozen=True, kw_only=True)
class SelftestRequest:
    full: bool  # every fault and every twin, and the corpus; else the quick ones
    score: bool  # the score as JSON on stdout, and all lines on stderr
    seed: int  # decides every place
    programs: tuple[str, ...] = ()  # of the corpus, by name or glob, and nothing else
    out: Path | None
    command: str  # as typed


def drawn(kinds: Iterable[Kind], seed: int) -> tuple[Planting, ...]:
    """Each fault and its twin, at a place that no rule can have learnt."""
    return tuple(planting for kind in kinds for planting in _at_a_place(kind, seed))


def selftest(request: SelftestRequest, kinds: Iterable[Kind] = KINDS) -> int:
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
) -> tuple[int, list[Mark], Path | None]:
    if not plantings:
        return _RIGHT, [], None
    print(_head(plantings, request), file=people, flush=True)
    lines = _Lines(plantings, people)
    specs = tuple(_spec(planting) for planting in plantings)
    run = RunRequest(specs=specs, out=request.out, json=False, strict=True, probe="full", command=request.command)
    code = run_all(run, lines)
    marks = _marks(plantings, lines.run_dir)
    print("\n".join(_end(marks, plantings, lines.run_dir)), file=people)
    if request.score:
        print("\n".join(score_lines(marks)), file=people)
    return code, marks, lines.run_dir


def _possible(programs: Iterable[Trial], people: TextIO) -> tuple[Trial, ...]:
    """Those that this machine can run; of the others it is said what is missing."""
    lacks = {trial: lacking(trial) for trial in programs}
    for trial, lack in lacks.items():
        if lack is not None:
            print(f"SKIP   {trial.name}  needs {lack}", file=people)
    return tuple(trial for trial, lack in lacks.items() if lack is None)


def _corpus_runs(programs: Sequence[Trial], root: Path, request: SelftestRequest, people: TextIO) -> list[Answer]:
    if not programs:
        return []
    print(f"corpus     {len(programs)} programs of {root}", file=people, flush=True)
    wanted = CorpusRequest(root=root, out=request.out, command=request.command)
    answers = [answer for some in run_corpus(programs, wanted, people).values() for answer in some]
    print(f"{sum(not one.wrong for one in answers)} of {len(programs)} right", file=people)
    if request.score:
        print("\n".join(accuracy_lines(answers)), file=people)
    return answers


class _Lines(Silent):
    """In place of the terminal: one line a planting, as it is judged."""

    def __init__(self, plantings: Sequence[Planting], people: TextIO) -> None:
        self.run_dir: Path | None = None
        self._by_name = {planting.name: planting for planting in plantings}
        self._width = max(map(len, self._by_name), default=0)
        self._people = people

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self.run_dir = run_dir
        mark = marked(self._by_name[outcome.scenario], outcome)
        print(escape(mark_line(mark, self._width)), file=self._people, flush=True)

    def done(self, report: Report, run_dir: Path) -> None:  # noqa: ARG002
        self.run_dir = run_dir


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


def _at_a_place(kind: Kind, seed: int) -> tuple[Planting, Planting]:
    draw = random.Random(f"{seed} {kind.name}")
    rank, layer, step = draw.randrange(kind.ranks), draw.randrange(LAYERS), draw.randrange(1, kind.steps + 1)
    return planted(kind, rank=rank, layer=layer, step=step), twin(kind, rank=rank, layer=layer, step=step)


def _spec(planting: Planting) -> RunSpec:
    """By the path of every scenario: file, overrides, checks, machine. Neither ./scenarios nor NSA_ names reach it."""
    root = shipped_root()
    question = Invocation(words=(str(root / _PARENT), *words_of(planting)), working_dir=root, environ={})
    (spec,) = planned_specs(question, machine_facts()).specs
    assert isinstance(spec, RunSpec)
    return replace(spec, scenario=planting.name, about=f"selftest: {planting.fault.kind} at {planting}")


def _marks(plantings: Sequence[Planting], run_dir: Path | None) -> list[Mark]:
    """From report.json, as any other program would read it."""
    if run_dir is None:
        return []
    stored = RunDir(run_dir).report
    outcomes = {outcome.scenario: outcome for outcome in from_json(stored.read_text(), str(stored)).outcomes}
    return [marked(planting, outcomes[planting.name]) for planting in plantings if planting.name in outcomes]


def _head(plantings: Sequence[Planting], request: SelftestRequest) -> str:
    faults = sum(planting.must_say.cause is not None for planting in plantings)
    return (
        f"selftest   {faults} planted faults, {len(plantings) - faults} healthy twins, seed {request.seed} "
        f"(--seed {request.seed} plants them at the same places)"
    )


def _end(marks: Sequence[Mark], plantings: Sequence[Planting], run_dir: Path | None) -> Iterator[str]:
    right = sum(not mark.wrong for mark in marks)
    unfinished = len(plantings) - len(marks)
    yield f"{right} of {len(plantings)} right" + (f", {unfinished} not run" if unfinished else "")
    if run_dir is not None:
        yield f"report     {run_dir / 'SUMMARY.md'}"
