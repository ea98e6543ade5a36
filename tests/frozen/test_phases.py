"""Every rule over every frozen evidence, the recordings among them: what it names, and which of two counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations

from freeze import evidence_lines, evidence_of

from nsa_harness.core.diagnosis.context import Case, Explanation
from nsa_harness.core.diagnosis.engine import RULES as OF_ANY_PROGRAM
from nsa_harness.core.diagnosis.engine import by_phase
from nsa_harness.core.diagnosis.phases import RulePhase
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.subject.tables import RULES as OWN_RULES

RULES = (*OF_ANY_PROGRAM, *OWN_RULES)


@cache
def answers() -> dict[int, dict[RulePhase, dict[str, Explanation]]]:
    """What every rule says of every frozen evidence, the recordings among them, by its line."""
    return {number: dict(_answers(line)) for number, line in enumerate(evidence_lines(), 1)}


def _answers(line: str) -> Iterator[tuple[RulePhase, dict[str, Explanation]]]:
    evidence = evidence_of(json.loads(line))
    case = Case(evidence=evidence, judgement=judge(evidence))
    for phase in asked(case):
        yield phase, {one.name: found for one in by_phase(RULES)[phase] if (found := one(case)) is not None}


def asked(case: Case) -> list[RulePhase]:
    """Of a PASS no cause is looked for, and of an ERROR only why it is one."""
    status = case.judgement.status
    phases = {Status.PASS: [], Status.ERROR: [RulePhase.NOT_JUDGED]}
    return [*phases.get(status, [one for one in RulePhase if one is not RulePhase.SILENT]), RulePhase.SILENT]


def outranked(name: str) -> set[str]:
    """The rules that this one outranks, directly or through another."""
    direct = {
        one.name: {*one.outranks, *(lower.name for lower in RULES if one.name in lower.outranked_by)} for one in RULES
    }
    below: set[str] = set()
    queue = [*direct[name]]
    while queue:
        below.add(one := queue.pop())
        queue += direct[one]
    return below


def test_where_two_rules_of_a_phase_answer_one_case_it_is_declared_which_counts() -> None:
    undeclared = {
        (one, other): number
        for number, phases in answers().items()
        for said in phases.values()
        for one, other in combinations(said, 2)
        if other not in outranked(one) and one not in outranked(other)
    }
    assert undeclared == {}, "both rules answer that line of tests/frozen: give one of them outranks=(the other,)"


def test_no_precedence_is_declared_twice_or_across_phases() -> None:
    phase_of = {one.name: one.phase for one in RULES}
    for one in RULES:
        assert all(phase_of[name] is one.phase for name in one.outranks), one.name
        again = {name for name in one.outranks for other in one.outranks if name in outranked(other)}
        assert again == set(), f"{one.name} need not say that it outranks {again}: what it outranks does"


def test_a_rule_names_no_cause_but_those_that_it_declares() -> None:
    said = {(name, one.cause) for phases in answers().values() for by in phases.values() for name, one in by.items()}
    declared = {(one.name, cause) for one in RULES for cause in one.causes}
    assert said - declared == set(), "name the cause in @rule"
    assert len(said) > len(RULES), "most rules answer some frozen evidence"
