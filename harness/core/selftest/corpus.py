"""The corpus of faults: programs that carry a label each, and what a report says against it.

A program ends in its fault when its first word is `fault`, and takes the same path to a good end when it is `healthy`.
Its label is a literal at the top; the line that is to blame ends in the comment of MARKER.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from nsa_harness.core.report import Outcome, Place, Status

MARKER = "# to blame"
LINES_OFF = 2  # a line named this close to the marked one is right
FAULT, HEALTHY = "fault", "healthy"
_LABEL = "LABEL"
_KEYS = frozenset(
    {"ranks", "verdict", "kind", "cause", "culprit", "step", "limits", "twin", "words", "env", "needs", "repeat"}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Label:
    """What a program is, and what is due. `culprit` empty: no rank is to blame; `line` None: there is none to name."""

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
    words: tuple[str, ...] = ()  # behind `fault` or `healthy`
    env: Mapping[str, str] = field(default_factory=dict)
    twin: bool = True  # it can be healthy
    needs: tuple[str, ...] = ()  # what the machine must have: "root", "gpu"
    repeat: int = 1  # attempts, for a fault that shows only in some of them

    @property
    def control(self) -> bool:
        """A program with nothing wrong, however odd it looks."""
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
        """Nothing is wrong with it: it must pass, and nothing may be said against it."""
        return self.healthy or self.label.control

    @property
    def due(self) -> str:
        return Status.PASS if self.sound else self.label.verdict


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a report says of a trial, as far as a label can tell. `wrong` names the parts that differ."""

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
    """The label in a program's text. Raises ValueError, which names the program and the mistake."""
    try:
        tree = ast.parse(text)
        (literal,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node) == [_LABEL])
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
    """Each fault followed by its twin."""
    return tuple(
        Trial(label=label, healthy=healthy)
        for label in labels
        for healthy in (False, True)
        if not healthy or label.twin
    )


def answered(trial: Trial, outcome: Outcome) -> Answer:
    """What the report says, and which parts of it differ from what is due."""
    cause, place, ranks, confidence = _blamed(trial, outcome)
    said = Answer(
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
    return Answer(**{**vars(said), "wrong": tuple(_wrong(trial, said))})


def answer_line(one: Answer, width: int) -> str:
    """One line: the program, what was said of it, and what of that is wrong."""
    said = " ".join(filter(None, [one.verdict, one.cause]))
    line = f"{'WRONG' if one.wrong else 'right'}  {one.trial.name:<{width}}  {said}   {one.wall_s:.1f} s"
    if not one.wrong:
        return line
    label = one.trial.label
    due = one.trial.due if one.trial.sound else _text(label.verdict, label.cause, label.culprit, label.line, label.step)
    return (
        f"{line}   {_text('said', None, one.culprit, one.line, one.step)}, due {due}; differs in {', '.join(one.wrong)}"
    )


def _blamed(trial: Trial, outcome: Outcome) -> tuple[str | None, Place | None, tuple[int, ...], float | None]:
    """The verdict's cause; of a run that passed, the finding that is due, or else the first one."""
    findings = outcome.findings
    due = next((one for one in findings if one.code == trial.label.cause), None)
    main = findings[0] if findings else None
    if outcome.verdict.cause is not None:
        culprit = outcome.culprit
        ranks, place = (culprit.ranks, culprit.place) if culprit else ((), None)
        return outcome.verdict.cause, place, ranks, main.confidence if main else None
    one = due or main
    return (one.code, one.place, one.ranks, one.confidence) if one else (None, None, (), None)


def _wrong(trial: Trial, said: Answer) -> Iterator[str]:
    label = trial.label
    if said.verdict != trial.due:
        yield "verdict"
    if trial.sound:
        if said.cause is not None:
            yield "cause"
        return
    if label.kind is not None and said.kind != label.kind:
        yield "kind"
    if said.cause != label.cause:
        yield "cause"
    if label.culprit and set(said.culprit) != set(label.culprit):
        yield "culprit"
    if label.line is not None and not _near(label, said):
        yield "line"
    if label.step is not None and said.step != label.step:
        yield "step"


def _near(label: Label, said: Answer) -> bool:
    if said.file is None or said.line is None or label.line is None:
        return False
    return PurePath(said.file).stem == label.name and abs(said.line - label.line) <= LINES_OFF


def _text(verdict: str, cause: str | None, ranks: Sequence[int], line: int | None, step: int | None) -> str:
    where = [f"rank {'+'.join(map(str, ranks))}"] if ranks else []
    where += [f"{name} {value}" for name, value in (("line", line), ("step", step)) if value is not None]
    return " ".join([*filter(None, [verdict, cause]), *where])


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
