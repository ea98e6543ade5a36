"""Guests in jobs of strangers, seen from the command line: what they cannot observe is said."""

from __future__ import annotations

import sys

import pytest

from .conftest import PROGRAMS


@pytest.mark.parametrize(
    "command",
    [f'[{sys.executable}, -I, -c, "print(1)"]', '[sh, -c, "echo 1"]'],
    ids=["isolated interpreter", "not Python"],
)
def test_a_rank_that_takes_no_probe_passes_and_the_report_says_what_was_not_seen(workspace, command):
    workspace.scenario("stranger", f"about: no probe\nrun: {{ranks: 1, command: {command}}}\n")
    ran = workspace.harness("run", "stranger")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
    assert {trouble["what"] for trouble in ran.outcome["trouble"]} == {"status file"}
    assert (ran.run_dir / "stranger" / "output.log").read_text().endswith("1\n")


@pytest.mark.parametrize("launcher", ["forked", pytest.param("by torchrun", marks=pytest.mark.slow)], indirect=True)
def test_a_program_with_handlers_of_its_own_ends_by_its_own_exception(launcher, tmp_path):
    program = PROGRAMS / "guest_ends.py"
    outcome = launcher.outcome_of("stranger", f"about: handlers\nrun: {{ranks: 2, program: {program}}}\n")

    assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "exception")
    assert outcome["culprit"]["ranks"] == [1]
    (output,) = tmp_path.glob("reports/2*/stranger/output.log")
    assert output.read_text().count("the user's hook saw ValueError") == 1
    assert outcome["trouble"] == []
