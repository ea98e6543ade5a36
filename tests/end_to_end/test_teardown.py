"""The end of a run that does not want to end: five seconds at most, and nothing is left."""

from __future__ import annotations

import json

from .conftest import PROGRAMS

LIMIT_S = 5.0


def test_stopped_ranks_ignored_signals_and_children_in_other_sessions_are_gone_within_five_seconds(workspace):
    ran = workspace.harness("run", "--script", str(PROGRAMS / "clingers.py"), "--ranks", "2")
    outcome = ran.outcome

    assert (ran.code, outcome["verdict"], outcome["kind"]) == (124, "HANG", "stopped")
    assert outcome["culprit"]["ranks"] == [1]
    assert outcome["timing"]["teardown_s"] <= LIMIT_S
    assert outcome["timing"]["detected_s"] >= 5.0, "what our own SIGCONT made it do is not its last mark"
    lines = (ran.run_dir / outcome["dir"] / "processes.jsonl").read_text().splitlines()
    journal = [json.loads(line) for line in lines]
    sent = [event["signal"] for event in journal if event["event"] == "signal"]
    assert {"SIGTERM", "SIGKILL"} <= set(sent), "politeness was tried, and did not do"
    assert [event["left"] for event in journal if event["event"] == "ended"] == [[]]
