"""Where a source is missing the others must do: right verdict, best attribution, and what is missing is said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nsa_harness.faults import acts

from . import conftest
from .conftest import PROGRAMS

# A rank loads it by its path, and not by that of a link.
ACTS = str(Path(acts.__file__).resolve())

BLIND = PROGRAMS / "blind.py"
TIMES = "limits: {busy_s: 8, open_wait_s: 8, deadline_s: 120}"
SHORT = "limits: {stall_s: 2, open_wait_s: 3, deadline_s: 120}"  # for a wait that shows all at the first look


def scenario(kind: str, limits: str = TIMES) -> str:
    return f"about: blind\nrun: {{ranks: 2, program: {BLIND}, args: [{kind}]}}\n{limits}\n"


def line_of(text: str) -> int:
    lines = BLIND.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def trouble_of(outcome, what: str, rank: int) -> str:
    return next(one["why"] for one in outcome["trouble"] if (one["what"], one["rank"]) == (what, rank))


@pytest.mark.slow
def test_without_a_probe_a_healthy_run_passes_and_says_what_was_not_seen(workspace):
    ran = workspace.harness("run", "ddp_onestep", "--probe", "off")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
    assert {trouble["what"] for trouble in ran.outcome["trouble"]} == {"status file"}


@pytest.mark.slow
def test_without_a_probe_a_closed_wait_is_still_proven_and_blamed_on_the_right_rank(workspace):
    outcome = workspace.harness("run", "fault_deadlock", "--probe", "off").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "deadlock", "backward_function_blocked")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["file"] == ACTS


def test_a_rank_that_holds_the_interpreters_lock_in_c_is_named_with_the_c_function(forks):
    outcome = forks.outcome_of("held", scenario("gil", SHORT))

    assert (outcome["verdict"], outcome["cause"]) == ("HANG", "gil_held_native")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["line"] == line_of("PyDLL(None)")
    assert "sleep (libc.so.6)" in outcome["summary"]


@pytest.mark.slow
def test_a_rank_that_computes_in_c_is_named_with_the_line_that_called_it(workspace):
    workspace.scenario("native", scenario("native"))
    outcome = workspace.harness("run", "native").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "livelock", "native_busy_loop")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["line"] == line_of("libc.qsort(")
    assert 8 <= outcome["timing"]["quiet_s"] <= 16


@pytest.mark.slow
def test_a_stopped_rank_is_read_without_ptrace_and_what_it_could_not_answer_is_said(workspace):
    workspace.scenario("stopped", scenario("stopped"))
    outcome = workspace.harness("run", "stopped").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "stopped", "stopped_process")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["line"] == line_of("signal.SIGSTOP")
    assert "no response from the heartbeat thread" in trouble_of(outcome, "flight recorder", 1)


@pytest.mark.skipif(shutil.which("capsh") is None, reason="needs capsh to give up the right to trace")
def test_a_rank_that_nobody_may_look_into_is_still_blamed_and_every_missing_source_is_said(workspace, monkeypatch):
    """Without ptrace and without /proc: the signalled faulthandler, the board and the worker server remain."""
    without = ["capsh", "--drop=cap_sys_ptrace", "--shell=/usr/bin/env", "--"]
    if subprocess.run([*without, "true"], check=False).returncode != 0:
        pytest.skip("not allowed to give up a capability")
    monkeypatch.setattr(conftest, "COMMAND", [*without, *conftest.COMMAND])
    workspace.scenario("hidden", scenario("hidden", SHORT))
    outcome = workspace.harness("run", "hidden").outcome

    assert outcome["verdict"] == "HANG"
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["function"] == "hide_and_lock"
    stacks, kernel = trouble_of(outcome, "stacks", 1), trouble_of(outcome, "kernel", 1)
    assert stacks.endswith("; read with faulthandler instead")
    assert "the system call it is blocked in, bytes read and written, open descriptors" in kernel
