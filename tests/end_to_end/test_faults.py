"""Each planted fault gets its verdict, cause, culprit and line, wherever it is planted; its healthy twin passes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nsa_harness.faults import acts

# A rank loads it by its path, and not by that of a link.
ACTS = str(Path(acts.__file__).resolve())

# The function of faults/acts.py that a stack must name. None: nobody can ask a killed rank for its line.
LINES = {
    "deadlock": "_wait_for_the_lock",
    "raise": "_raise",
    "sigkill": None,
    "endless_loop": "_spin_until",
    "sigstop": "send_itself_sigstop",
    "exit0": None,
}
EXPECTED = {
    "deadlock": ("HANG", "deadlock", "backward_function_blocked"),
    "skip_collective": ("HANG", "deadlock", "rank_conditional_collective"),
    "raise": ("FAIL", None, "exception"),
    "sigkill": ("FAIL", None, "killed"),
    "endless_loop": ("HANG", "livelock", "infinite_loop"),
    "sigstop": ("HANG", "stopped", "stopped_process"),
    "exit0": ("FAIL", None, "early_exit"),
}
STALL_S = 1  # in place of five
BUSY_S = 3  # in place of a minute
CLOSED_WAIT_LIMIT_S = 15
HEALS_S = 3  # longer than the stall limit


def planted(kind: str, seed: int, limits: str = "", **more: object) -> tuple[str, dict[str, int]]:
    """A scenario with the fault at a rank, layer and step drawn by seed."""
    draw = random.Random(f"{kind} {seed}")
    where = {"rank": draw.randrange(2), "layer": draw.randrange(4), "step": draw.randrange(1, 3)}
    fault = {"kind": kind, **where, **more}
    if kind == "skip_collective":
        del fault["layer"]
    text = (
        "about: planted\nextends: base/fault\n"
        f"limits: {{stall_s: {STALL_S}, {limits or 'deadline_s: 200'}}}\n"
        f"fault: {{{', '.join(f'{key}: {value}' for key, value in fault.items())}}}\n"
        "expect: {verdict: PASS}\n"
    )
    return text, where


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
# Ranks that raise, are killed or stopped are met by the quick tests of forked launches, of kills, meshes and teardown.
ELSEWHERE = ("raise", "sigkill", "sigstop")
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in ELSEWHERE else kind for kind in EXPECTED]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named_with_its_rank_line_layer_and_step(launcher, kind, seed):
    text, where = planted(kind, seed, f"busy_s: {BUSY_S}, deadline_s: 200")
    outcome = launcher.outcome_of("subject", text)

    verdict, hang_kind, cause = EXPECTED[kind]
    culprit = outcome["culprit"]
    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == (verdict, hang_kind, cause)
    assert culprit["ranks"] == [where["rank"]]
    assert outcome["victims"] == [1 - where["rank"]]
    assert culprit["step"] == where["step"]
    if kind == "skip_collective":
        assert culprit["place"]["function"] == "average_over_ranks"
        assert culprit["collective"]["op"] == "all_reduce"
    else:
        assert culprit["place"]["layer"] == where["layer"]
    if LINES.get(kind):
        assert culprit["place"]["file"] == ACTS
        assert culprit["place"]["function"] == LINES[kind]
    if hang_kind == "deadlock":
        assert outcome["timing"]["detected_s"] <= CLOSED_WAIT_LIMIT_S


# No twin of sigstop: nobody can tell who will resume a stopped rank.
QUICK_TWINS = ["endless_loop"]
SLOW_TWINS = ["deadlock", "slow_step", "skip_collective", "raise", "sigkill"]
TWINS = [*QUICK_TWINS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_TWINS)]


@pytest.mark.parametrize("kind", TWINS)
def test_the_healthy_twin_of_a_fault_passes(launcher, kind):
    """The same path, over after a while that is longer than the stall limit."""
    text, _ = planted(kind, 0, heals_s=HEALS_S)
    outcome = launcher.outcome_of("twin", text)

    assert (outcome["verdict"], outcome["expected"]) == ("PASS", True)


def test_a_slow_step_at_its_deadline_is_slow_and_names_the_loop(forks):
    text, where = planted("slow_step", 0, "deadline_s: 10", heals_s=60)
    outcome = forks.outcome_of("slow", text)

    place = outcome["culprit"]["place"]
    assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "slow")
    assert outcome["culprit"]["ranks"] == [where["rank"]]
    assert (place["file"], place["function"]) == (ACTS, "_select_token_by_token")


@pytest.mark.slow
def test_a_step_of_40_s_in_a_token_loop_passes(workspace):
    text, _ = planted("slow_step", 1, heals_s=40)
    workspace.scenario("slow", text)
    ran = workspace.harness("run", "slow")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
