"""An explanation, which is the result of a diagnosis rule.

It has a cause and the facts that show it, but no sentence. `texts/sentences.py` makes the sentence from the facts and
the template of the cause in `texts/causes.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import TypeVarTuple

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import LIKELY, EvidenceKind, confidence
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.report import CollectiveRef, Facts, Finding, Place

Rule = Callable[[DiagnosisContext], "Explanation | None"]
Match = TypeVarTuple("Match")


@dataclass(frozen=True, kw_only=True)
class OpenQuestion:
    """A question that the evidence leaves open, such as whether there is another explanation."""

    code: str  # key of its text, in [left_open] of texts/causes.toml
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An explanation of a run: the cause, the facts that show it, and the culprit."""

    cause: Cause
    evidence: EvidenceKind  # kind of the evidence on which this explanation is based
    facts: Facts = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    place: Place | None = None
    proof: tuple[str, ...] = ()  # files that show the cause, relative to the attempt's directory
    step: int | None = None  # step of the fault; None: the step that the first rank is in
    collective: CollectiveRef | None = None
    parties: tuple[int, ...] | None = None  # the ranks that disagree; None: every rank
    left_open: tuple[OpenQuestion, ...] = ()
    caveat: OpenQuestion | None = None  # the open question that makes a certain cause only likely
    reason: Cause | None = None  # a certain finding of the same run that explains this cause

    @property
    def confidence(self) -> float:
        """The confidence in the cause, from 0 to 1."""
        value = confidence(self.evidence, self.cause.row.certain_by, left_open=self.caveat is not None)
        return max(value, LIKELY) if self.reason else value

    @property
    def open_questions(self) -> tuple[OpenQuestion, ...]:
        """All questions that the evidence leaves unanswered."""
        return self.left_open if self.caveat is None else (*self.left_open, self.caveat)

    def to_finding(self, claim: str, advice: str, left_open: tuple[str, ...] = ()) -> Finding:
        """Convert this explanation to a finding for the report. `claim` and `advice` are the sentences to show."""
        return Finding(
            code=self.cause.value,
            claim=claim,
            ranks=self.ranks,
            place=self.place,
            confidence=self.confidence,
            proof=self.proof,
            advice=advice,
            left_open=left_open,
            facts=json_facts(self.facts),
        )


def json_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the facts in which every value is of a JSON type."""
    return {name: _json_value(fact) for name, fact in facts.items()}


def _json_value(fact: object) -> object:
    match fact:
        case Place():
            return {name: value for name, value in asdict(fact).items() if value is not None}
        case Mapping():
            return {name: _json_value(value) for name, value in fact.items()}
        case str():
            return fact
        case Sequence():
            return [_json_value(value) for value in fact]
    return fact


def rule_if(
    find: Callable[[DiagnosisContext], tuple[*Match] | None],
) -> Callable[[Callable[[DiagnosisContext, *Match], Explanation | None]], Rule]:
    """Return a decorator for rules that apply unless `find(context)` is None. They receive the values that it found."""

    def rule_of(explain: Callable[[DiagnosisContext, *Match], Explanation | None]) -> Rule:
        @wraps(explain, assigned=("__module__", "__name__", "__doc__"))
        def rule(context: DiagnosisContext) -> Explanation | None:
            match = find(context)
            return None if match is None else explain(context, *match)

        return rule

    return rule_of


def make_finding(
    cause: Cause,
    facts: Facts,
    *,
    evidence: EvidenceKind,
    ranks: tuple[int, ...] = (),
    place: Place | None = None,
    proof: tuple[str, ...] = (),
) -> Finding:
    """Create a finding without a rule. `with_words` of texts/sentences.py adds its claim and advice."""
    certainty = Explanation(cause=cause, evidence=evidence).confidence
    return Finding(
        code=cause.value, claim="", ranks=ranks, place=place, confidence=certainty, proof=proof, advice="", facts=facts
    )
