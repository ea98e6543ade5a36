"""The corpus of faults: programs that carry a label each, how they are run, and what a report says against the label.

A program ends in its fault when its first word is `fault`, and takes the same path to a good end when it is `healthy`.
Its label is a literal at the top; the line that is to blame ends in the comment of MARKER.
"""

from __future__ import annotations

import ast
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePath
from typing import TextIO

from nsa_harness.commands.run import run_all
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Place, Report, Status
from nsa_harness.core.schedule import Policy
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.listener import Listener
from nsa_harness.render.text import escape
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions

MARKER = "# to blame"
LINES_OFF = 2  # a line named this close to the marked one is right
FAULT, HEALTHY = "fault", "healthy"
_LABEL = "LABEL"
_INTERRUPTED = 130
_DEADLINE_S = 120.0
_MOST_BYTES = 64 << 20  # of a report
_KEYS = frozenset(
    {"ranks", "verdict", "kind", "cause", "culprit", "step", "limits", "twin", "words", "env", "needs", "repeat"}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Label:
    """A program and the report that it must lead to. `culprit` is empty if no rank is at fault; `line` may be None."""

    name: str
    about: str
    verdict: str
    ranks: int = 2
    kind: str | None = None
    cause: str | None = None
    culprit: tuple[int, ...] = ()
    line: int | None = None
    step: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # after `fault` or `healthy`
    env: Mapping[str, str] = field(default_factory=dict)
    twin: bool = True  # the program can be healthy
    needs: tuple[str, ...] = ()  # what the machine must have: "root", "gpu"
    repeat: int = 1  # attempts, for a fault that shows only in some of them

    @property
    def control(self) -> bool:
        """Whether nothing is wrong with the program, however odd it looks."""
        return self.verdict == Status.PASS and self.cause is None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One program, with its fault or without."""

    label: Label
    healthy: bool

    @property
    def name(self) -> str:
        return f"{self.label.name}_healthy" if self.healthy else self.label.name

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: the run must pass without a finding."""
        return self.healthy or self.label.control

    @property
    def due(self) -> str:
        return Status.PASS if self.sound else self.label.verdict


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The parts of a report that a label can state. `wrong` names the parts that differ from the label."""

    trial: Trial
    verdict: str
    kind: str | None
    cause: str | None
    culprit: tuple[int, ...]
    file: str | None
    line: int | None
    step: int | None
    confidence: float | None
    detected_s: float | None
    wall_s: float
    wrong: tuple[str, ...] = ()


def read_label(name: str, text: str) -> Label:
    """Return the label in a program's text. Raises ValueError, which names the program and the mistake."""
    try:
        tree = ast.parse(text)
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        (literal,) = (one.value for one in assigned if [ast.unparse(target) for target in one.targets] == [_LABEL])
        given = ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{name}: a program of the corpus has one literal {_LABEL} at its top: {error}") from None
    if not isinstance(given, dict) or "verdict" not in given:
        raise ValueError(f"{name}: {_LABEL} is a dict with a verdict")
    if unknown := sorted(set(given) - _KEYS):
        raise ValueError(f"{name}: {_LABEL} does not know {', '.join(unknown)}; known: {', '.join(sorted(_KEYS))}")
    marked = [number for number, line in enumerate(text.splitlines(), start=1) if line.rstrip().endswith(MARKER)]
    if len(marked) > 1:
        raise ValueError(f"{name}: {MARKER!r} ends lines {marked}; one line is to blame")
    about = (ast.get_docstring(tree) or "").partition("\n")[0]
    sequences = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    twin = given.get("twin", given["verdict"] != Status.PASS or given.get("cause") is not None)
    return Label(**{**sequences, "name": name, "about": about, "line": marked[0] if marked else None, "twin": twin})


def trials(labels: Sequence[Label]) -> tuple[Trial, ...]:
    """Return the trials, each fault followed by its twin."""
    return tuple(
        Trial(label=label, healthy=healthy)
        for label in labels
        for healthy in (False, True)
        if not healthy or label.twin
    )


def trial_result(trial: Trial, outcome: Outcome) -> TrialResult:
    """Compare the report with the label."""
    cause, place, ranks, confidence = _blamed(trial, outcome)
    said = TrialResult(
        trial=trial,
        verdict=outcome.verdict.status,
        kind=outcome.verdict.kind,
        cause=cause,
        culprit=ranks,
        file=place.file if place else None,
        line=place.line if place else None,
        step=outcome.culprit.step if outcome.culprit else None,
        confidence=confidence,
        detected_s=outcome.timing.detected_s,
        wall_s=outcome.timing.wall_s,
    )
    return replace(said, wrong=_wrong(trial, said))


def trial_line(one: TrialResult, width: int) -> str:
    """Return one line: the program, the report, and the parts of the report that are wrong."""
    said = " ".join(filter(None, [one.verdict, one.cause]))
    line = f"{'WRONG' if one.wrong else 'right'}  {one.trial.name:<{width}}  {said}   {one.wall_s:.1f} s"
    if not one.wrong:
        return line
    label = one.trial.label
    expected = _shown(label.verdict, label.cause, label.culprit, label.line, label.step)
    said = _shown("said", None, one.culprit, one.line, one.step)
    return f"{line}   {said}, due {one.trial.due if one.trial.sound else expected}; differs in {', '.join(one.wrong)}"


def _blamed(trial: Trial, outcome: Outcome) -> tuple[str | None, Place | None, tuple[int, ...], float | None]:
    """Return the verdict's cause; for a run that passed, the expected finding or else the first finding."""
    findings = outcome.findings
    if outcome.verdict.cause is not None:
        culprit = outcome.culprit
        ranks, place = (culprit.ranks, culprit.place) if culprit else ((), None)
        return outcome.verdict.cause, place, ranks, findings[0].confidence if findings else None
    due = [one for one in findings if one.code == trial.label.cause]
    one = next(iter((*due, *findings)), None)
    return (one.code, one.place, one.ranks, one.confidence) if one else (None, None, (), None)


def _wrong(trial: Trial, said: TrialResult) -> tuple[str, ...]:
    label = trial.label
    differs = {"verdict": said.verdict != trial.due, "cause": said.cause is not None}
    if not trial.sound:
        differs = {
            "verdict": said.verdict != trial.due,
            "kind": label.kind is not None and said.kind != label.kind,
            "cause": said.cause != label.cause,
            "culprit": bool(label.culprit) and set(said.culprit) != set(label.culprit),
            "line": label.line is not None and not _near(label, said),
            "step": label.step is not None and said.step != label.step,
        }
    return tuple(part for part, wrong in differs.items() if wrong)


def _near(label: Label, said: TrialResult) -> bool:
    if said.file is None or said.line is None or label.line is None:
        return False
    return PurePath(said.file).stem == label.name and abs(said.line - label.line) <= LINES_OFF


def _shown(verdict: str, cause: str | None, ranks: Sequence[int], line: int | None, step: int | None) -> str:
    where = [f"rank {'+'.join(map(str, ranks))}"] if ranks else []
    where += [f"{name} {value}" for name, value in (("line", line), ("step", step)) if value is not None]
    return " ".join([*filter(None, [verdict, cause]), *where])


_BANDS = (("certain", CERTAIN, 2.0), ("likely", 0.6, CERTAIN), ("unknown", 0.0, 0.6))  # as a report words a confidence
_BLAME = ("verdict", "cause", "culprit")  # right in all of them, a trial is explained
_PARTS = ("verdict", "culprit", "cause", "line", "step")  # each with a share of its own


@dataclass(frozen=True, kw_only=True)
class Share:
    """The number of right answers and of all answers. Without answers there is no rate."""

    right: int
    of: int

    @property
    def rate(self) -> float | None:
        return self.right / self.of if self.of else None

    def __str__(self) -> str:
        return "-" if self.rate is None else f"{100 * self.rate:.1f} % ({self.right} of {self.of})"


@dataclass(frozen=True, kw_only=True)
class Score:
    """How often a cause was planted, how often it was reported, and how often both."""

    planted: int
    said: int
    right: int

    @property
    def precision(self) -> float | None:
        return self.right / self.said if self.said else None

    @property
    def recall(self) -> float | None:
        return self.right / self.planted if self.planted else None

    def values(self) -> dict[str, object]:
        """Return the score for JSON."""
        return {**vars(self), "precision": self.precision, "recall": self.recall}


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The shares of right parts over all answers, and what was wrongly reported for healthy programs."""

    verdict: Share
    culprit: Share
    cause: Share
    line: Share
    step: Share
    causes: dict[str, Score]
    bands: dict[str, Share]  # by confidence: cause and culprit both right
    certain_and_wrong: tuple[str, ...]
    false_hangs: tuple[str, ...]
    false_alarms: tuple[str, ...]  # a finding on a program with nothing wrong
    latency_median_s: float | None  # of a HANG, from the culprit's last progress to the verdict
    latency_95_s: float | None


def accuracy(answers: Sequence[TrialResult]) -> Accuracy:
    faults = [one for one in answers if not one.trial.sound]
    sound = [one for one in answers if one.trial.sound]
    pairs = [(one.trial.label.cause, one.cause) for one in faults] + [(None, one.cause) for one in sound]
    bands = {
        name: [one for one in faults if one.confidence is not None and low <= one.confidence < high]
        for name, low, high in _BANDS
    }
    latencies = sorted(one.detected_s for one in faults if one.detected_s is not None and one.verdict == Status.HANG)
    return Accuracy(
        verdict=_share(answers, "verdict"),
        culprit=_share([one for one in faults if one.trial.label.culprit], "culprit"),
        cause=_share(faults, "cause"),
        line=_share([one for one in faults if one.trial.label.line is not None], "line"),
        step=_share([one for one in faults if one.trial.label.step is not None], "step"),
        causes=scores(pairs),
        bands={name: _share(within, *_BLAME) for name, within in bands.items()},
        certain_and_wrong=tuple(one.trial.name for one in bands["certain"] if not set(_BLAME).isdisjoint(one.wrong)),
        false_hangs=tuple(one.trial.name for one in sound if one.verdict == Status.HANG),
        false_alarms=tuple(one.trial.name for one in sound if one.cause is not None),
        latency_median_s=statistics.median(latencies) if latencies else None,
        latency_95_s=latencies[round(0.95 * (len(latencies) - 1))] if latencies else None,
    )


def scores(pairs: Sequence[tuple[str | None, str | None]]) -> dict[str, Score]:
    """Return the score of each cause, from pairs of planted and reported. A cause of a twin costs precision."""
    words = sorted({word for pair in pairs for word in pair if word is not None})
    return {
        word: Score(
            planted=sum(due == word for due, _ in pairs),
            said=sum(said == word for _, said in pairs),
            right=sum(due == said == word for due, said in pairs),
        )
        for word in words
    }


def accuracy_values(answers: Sequence[TrialResult]) -> dict[str, object]:
    """Return the figures and every answer behind them, for JSON."""
    found = accuracy(answers)
    return {
        "schema": 1,
        "programs": len({one.trial.label.name for one in answers}),
        "rates": {name: _share_values(getattr(found, name)) for name in _PARTS},
        "calibration": {name: _share_values(share) for name, share in found.bands.items()},
        "certain_and_wrong": list(found.certain_and_wrong),
        "false_hangs": list(found.false_hangs),
        "false_alarms": list(found.false_alarms),
        "hang_detected_s": {"median": found.latency_median_s, "p95": found.latency_95_s},
        "causes": {cause: one.values() for cause, one in found.causes.items()},
        "answers": [trial_values(one) for one in answers],
    }


def trial_values(one: TrialResult) -> dict[str, object]:
    """Return one trial for JSON: the label and the report."""
    label = one.trial.label
    due = None if one.trial.sound else label
    return {
        "name": one.trial.name,
        "ranks": label.ranks,
        "due": {
            "verdict": one.trial.due,
            "cause": due.cause if due else None,
            "culprit": list(due.culprit) if due else [],
            "line": due.line if due else None,
            "step": due.step if due else None,
        },
        "said": {
            "verdict": one.verdict,
            "kind": one.kind,
            "cause": one.cause,
            "culprit": list(one.culprit),
            "line": one.line,
            "step": one.step,
        },
        "confidence": one.confidence,
        "detected_s": one.detected_s,
        "wall_s": one.wall_s,
        "wrong": list(one.wrong),
    }


def _share(answers: Sequence[TrialResult], *parts: str) -> Share:
    return Share(right=sum(set(parts).isdisjoint(one.wrong) for one in answers), of=len(answers))


def _share_values(share: Share) -> dict[str, object]:
    return {"right": share.right, "of": share.of, "rate": share.rate}


# Running.


@dataclass(frozen=True, kw_only=True)
class CorpusRequest:
    root: Path
    out: Path | None
    command: str  # as typed
    jobs: int = 1  # runs at the same time


def corpus_root() -> Path:
    return Path(__file__).resolve().parents[1] / "tests" / "faults"


def corpus(root: Path) -> tuple[Trial, ...]:
    """Return every program, each fault followed by its twin. Raises UsageError for a label that is wrong."""
    try:
        return trials([read_label(path.stem, path.read_text()) for path in sorted(root.glob("[a-z]*.py"))])
    except ValueError as error:
        raise UsageError(f"the corpus cannot be read: {error}") from None


def lacking(trial: Trial) -> str | None:
    """Return what this machine lacks for the trial, or None."""
    if "root" in trial.label.needs and os.geteuid() != 0:
        return "root"
    if "gpu" in trial.label.needs and not machine_facts().gpus:
        return "a GPU"
    return None


def run_corpus(chosen: Sequence[Trial], request: CorpusRequest, lines: TextIO) -> dict[Path, list[TrialResult]]:
    """Run each trial once, or as often as its label wants; return the results by run directory.

    If a run was interrupted, there are fewer results than trials.
    """
    results: dict[Path, list[TrialResult]] = {}
    for repeat, group in groupby(sorted(chosen, key=_repeat), key=_repeat):
        some = tuple(group)
        screen = _Screen(some, lines, at_the_end=repeat > 1)
        run = RunRequest(
            specs=tuple(trial_spec(trial, request.root) for trial in some),
            options=RunOptions(command=request.command, out=request.out, strict=True),
            policy=Policy(repeat=repeat),
            jobs=request.jobs,
        )
        code = run_all(run, screen)
        if screen.run_dir is not None:
            results[screen.run_dir] = _results(some, screen.run_dir)
        if code == _INTERRUPTED:
            break
    return results


def trial_spec(trial: Trial, root: Path) -> RunSpec:
    """Plan the launch like that of any script on a command line: no label reaches the judge."""
    label = trial.label
    limits = {"deadline_s": _DEADLINE_S, **label.limits}
    args = (HEALTHY if trial.healthy else FAULT, *label.words)
    script = Script(file=str(root / f"{label.name}.py"), ranks=label.ranks, args=args)
    words = tuple(f"limits.{name}={value:g}" for name, value in limits.items())
    (spec,) = plan_launches(
        Invocation(arguments=words, script=script, working_dir=root, environ={}), machine_facts()
    ).specs
    assert isinstance(spec, RunSpec)
    return replace(spec, scenario=trial.name, about=label.about, env=tuple(sorted(label.env.items())))


class _Screen(Listener):
    """Prints one line per outcome as it is judged, or at the end, if one attempt says nothing."""

    def __init__(self, chosen: Sequence[Trial], lines: TextIO, *, at_the_end: bool) -> None:
        self.run_dir: Path | None = None
        self._trials = {trial.name: trial for trial in chosen}
        self._lines = lines
        self._at_the_end = at_the_end

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self.run_dir = run_dir
        if not self._at_the_end:
            self._print(outcome)

    def on_done(self, report: Report, run_dir: Path) -> None:
        self.run_dir = run_dir
        for outcome in report.outcomes if self._at_the_end else ():
            if outcome.final:
                self._print(outcome)

    def _print(self, outcome: Outcome) -> None:
        result = trial_result(self._trials[outcome.spec.scenario], outcome)
        print(escape(trial_line(result, max(map(len, self._trials)))), file=self._lines, flush=True)


def _results(chosen: Sequence[Trial], run_dir: Path) -> list[TrialResult]:
    """Compare the outcomes in report.json, as any other program would read them."""
    run = RunDir(run_dir)
    text = run.directory.read_whole_file(run.report, _MOST_BYTES).decode("utf-8")
    outcomes = {
        outcome.spec.scenario: outcome for outcome in from_json(text, str(run.report)).outcomes if outcome.final
    }
    return [trial_result(trial, outcomes[trial.name]) for trial in chosen if trial.name in outcomes]


def _repeat(trial: Trial) -> int:
    return trial.label.repeat
