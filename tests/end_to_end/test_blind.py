"""Without the probe there are no marks and no flight recorder: stacks and the kernel must do."""

from __future__ import annotations

from harness.faults import acts


def test_without_a_probe_a_healthy_run_passes_and_says_what_was_not_seen(workspace):
    ran = workspace.harness("run", "ddp_onestep", "--probe", "off")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
    assert {trouble["what"] for trouble in ran.outcome["trouble"]} == {"board"}


def test_without_a_probe_a_closed_wait_is_still_proven_and_blamed_on_the_right_rank(workspace):
    outcome = workspace.harness("run", "fault_deadlock", "--probe", "off").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "deadlock", "backward_function_blocked")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["file"] == acts.__file__
