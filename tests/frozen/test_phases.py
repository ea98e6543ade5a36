"""Every rule over every frozen evidence, the recordings among them: what it names, and which of two counts.

A change that means to let another rule count writes the pairs anew (`python tests/frozen/test_phases.py`), and its
review reads the difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

from freeze import evidence_lines, evidence_of

from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.rules import CAUSES, NOTED, RULES, RulePhase
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.subject.tables import RULES as OWN_RULES

EVERY = {**RULES, RulePhase.PROGRAM: OWN_RULES}
PAIRS = Path(__file__).with_name("rule_pairs.json")


@cache
def answers() -> dict[int, dict[RulePhase, tuple[str, ...]]]:
    """The rules of each phase that answer each frozen evidence, in their order, by its line."""
    return {number: dict(_answers(line)) for number, line in enumerate(evidence_lines(), 1)}


def _answers(line: str) -> Iterator[tuple[RulePhase, tuple[str, ...]]]:
    evidence = evidence_of(json.loads(line))
    context = DiagnosisContext(evidence=evidence, judgement=judge(evidence))
    for phase in asked(context):
        yield phase, tuple(rule.__name__ for rule in EVERY[phase] if rule(context) is not None)


def asked(context: DiagnosisContext) -> list[RulePhase]:
    """Of a PASS no cause is looked for, and of an ERROR only why it is one."""
    phases = {Status.PASS: (), Status.ERROR: (RulePhase.NOT_JUDGED,)}
    return [*phases.get(context.judgement.status, CAUSES), *NOTED]


def pairs() -> list[list[str]]:
    """The pairs of rules of one phase that answer one evidence, the one that counts first."""
    found = {pair for phases in answers().values() for names in phases.values() for pair in combinations(names, 2)}
    return sorted(map(list, found))


def test_of_two_rules_that_answer_one_run_the_same_one_counts_as_before() -> None:
    assert pairs() == json.loads(PAIRS.read_text(encoding="utf-8"))


def test_most_rules_answer_some_frozen_evidence() -> None:
    said = {name for phases in answers().values() for names in phases.values() for name in names}
    # Rules that were written after the evidence was frozen, such as those about several hosts, answer none of it.
    assert len(said) > 0.7 * sum(map(len, EVERY.values()))


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(pair) for pair in pairs())
    PAIRS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
