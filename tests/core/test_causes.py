"""The one table of causes: what is read from it."""

from __future__ import annotations

import pytest

from harness.core.declared.contradictions import contradictions
from harness.core.declared.scenario import Scenario
from harness.core.declared.scenario_types import ExpectedVerdict
from harness.core.diagnosed.causes import Cause, row_of


def mistakes(cause: str) -> list[str]:
    scenario = Scenario.model_validate({"name": "x", "expect": {"verdict": ExpectedVerdict.FAIL, "cause": cause}})
    return [what for _, what in contradictions(scenario)]


@pytest.mark.parametrize("cause", Cause)
def test_a_scenario_can_expect_whatever_a_verdict_can_come_with(cause: Cause) -> None:
    refused = mistakes(cause)
    assert (refused == []) is bool(cause.row.verdicts)
    assert all(words.startswith("no such cause; ") for words in refused)


def test_a_run_whose_loss_leads_to_no_parameter_can_be_expected() -> None:
    assert mistakes("no_gradient") == []
    assert mistakes("no_gradiant") == ['no such cause; did you mean "no_gradient"?']


def test_a_code_of_another_version_is_a_cause_that_is_unknown() -> None:
    assert row_of("of_tomorrow") is row_of(None) is Cause.UNKNOWN.row
    assert row_of("nan") is Cause.NAN.row
