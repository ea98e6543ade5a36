"""Explanation: the answer of a rule, which consists of a cause and the facts that show it. It has no sentence.

`texts/sentences.py` makes the sentence from the template of the cause in `texts/causes.toml`.
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
    """Another possible reading of the evidence, or something that no record shows."""

    code: str  # of its text in [left_open] of texts/causes.toml
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A cause, the facts for its sentence, and the ranks, place, step and collective of the culprit."""

    cause: Cause
    evidence: EvidenceKind  # on which the rule is based
    facts: Facts = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    place: Place | None = None
    proof: tuple[str, ...] = ()  # paths relative to the attempt
    step: int | None = None  # in which the fault happened; None: the step that the first rank is in
    collective: CollectiveRef | None = None
    parties: tuple[int, ...] | None = None  # the ranks that disagree; None: every rank
    left_open: tuple[OpenQuestion, ...] = ()
    caveat: OpenQuestion | None = None  # the one that makes a certain cause a likely one
    reason: Cause | None = None  # a certain finding of the same run that led to this cause

    @property
    def confidence(self) -> float:
        sure = confidence(self.evidence, self.cause.row.certain_by, left_open=self.caveat is not None)
        return max(sure, LIKELY) if self.reason else sure

    @property
    def open_questions(self) -> tuple[OpenQuestion, ...]:
        return self.left_open if self.caveat is None else (*self.left_open, self.caveat)

    def in_words(self, claim: str, advice: str, left_open: tuple[str, ...] = ()) -> Finding:
        """Return the finding that reports store, with these sentences."""
        return Finding(
            code=self.cause.value,
            claim=claim,
            ranks=self.ranks,
            place=self.place,
            confidence=self.confidence,
            proof=self.proof,
            advice=advice,
            left_open=left_open,
            facts=stored_facts(self.facts),
        )


def stored_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Return facts as values of JSON."""
    return {name: _stored(fact) for name, fact in facts.items()}


def _stored(fact: object) -> object:
    """Return the fact as a value of JSON. A place keeps only its known fields."""
    match fact:
        case Place():
            return {name: value for name, value in asdict(fact).items() if value is not None}
        case Mapping():
            return {name: _stored(value) for name, value in fact.items()}
        case str():
            return fact
        case Sequence():
            return [_stored(value) for value in fact]
    return fact


def given(
    find: Callable[[DiagnosisContext], tuple[*Match] | None],
) -> Callable[[Callable[[DiagnosisContext, *Match], Explanation | None]], Rule]:
    """Make a rule from a function that also takes the values of `find`. If `find` returns None, the rule does too."""

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
    """Return a finding about several runs or about the scenario, which no rule of the diagnosis can make.

    It has no sentences yet: `with_words` of texts/sentences.py adds them.
    """
    sure = Explanation(cause=cause, evidence=evidence).confidence
    return Finding(
        code=cause.value, claim="", ranks=ranks, place=place, confidence=sure, proof=proof, advice="", facts=facts
    )
