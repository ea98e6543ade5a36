"""What our own program tells of itself, and that no other program's run is asked for it."""

from __future__ import annotations

import pytest
from builders import case, evidence, rank_evidence, spec

from nsa_harness.core.diagnosis.engine import diagnose
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.outcome import outcome_of
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.subject.tables import RULES, gate_collapse


def gates(mean: float, share: float) -> Evidence:
    rows = [{"step": 20, "layer": layer, "branch": "sel", "mean": mean, "saturated_share": share} for layer in (3, 2)]
    return evidence(rank_evidence(0), reported=tuple(rows))


@pytest.mark.parametrize(
    ("mean", "share", "shut"), [(0.0004, 1.0, True), (0.3, 0.2, False), (0.009, 0.5, False), (0.998, 1.0, False)]
)
def test_a_gate_that_is_shut_for_every_token_is_a_collapse(mean: float, share: float, shut: bool) -> None:
    one = gate_collapse(case(gates(mean, share)))
    assert (one is not None) is shut
    if one is not None:
        assert (one.finding.place, one.finding.code) == (Place(layer=2, module="blocks.2.attn"), "gate_collapse")
        assert one.finding.claim == (
            "2 gates shut for every token in step 20: first branch sel of layer 2, mean 0.0004"
        )


def test_a_rule_of_one_program_is_asked_only_where_it_is_passed_in() -> None:
    seen = gates(0.0004, 1.0)
    assert "gate_collapse" in [one.code for one in diagnose(seen, judge(seen), RULES).findings]
    assert "gate_collapse" not in [one.code for one in diagnose(seen, judge(seen)).findings]
    told = outcome_of(spec(), seen, attempt=1, directory="a", artifacts=(), metrics={}, repeat="r", own_rules=RULES)
    assert "gate_collapse" in [one.code for one in told.findings]
