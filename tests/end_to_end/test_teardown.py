"""The end of a run that does not want to end: five seconds at most, and nothing is left."""

from __future__ import annotations

import json

import pytest

from .conftest import PROGRAMS

LIMIT_S = 5.0
STALL_S = 2.0
PROGRAM = PROGRAMS / "clingers.py"
CLINGERS = f"""
about: ranks that do not want to leave
run: {{ranks: 2, program: {PROGRAM}}}
limits: {{stall_s: {STALL_S}}}
"""


def line_of(text: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("launcher", ["forked", pytest.param("by torchrun", marks=pytest.mark.slow)], indirect=True)
def test_stopped_ranks_ignored_signals_and_children_in_other_sessions_are_gone_within_five_seconds(launcher, tmp_path):
    outcome = launcher.outcome_of("clingers", CLINGERS)

    culprit = outcome["culprit"]
    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "stopped", "stopped_process")
    assert (culprit["ranks"], outcome["victims"]) == ([1], [0])
    assert (culprit["place"]["file"], culprit["place"]["line"]) == (str(PROGRAM), line_of("signal.SIGSTOP"))
    assert outcome["timing"]["teardown_s"] <= LIMIT_S
    assert outcome["timing"]["detected_s"] >= STALL_S, "what our own SIGCONT made it do is not its last mark"
    (processes,) = tmp_path.glob("reports/2*/clingers/processes.jsonl")
    journal = [json.loads(line) for line in processes.read_text().splitlines()]
    sent = [event["signal"] for event in journal if event["event"] == "signal"]
    assert {"SIGTERM", "SIGKILL"} <= set(sent), "politeness was tried, and did not do"
    assert [event["left"] for event in journal if event["event"] == "ended"] == [[]]
