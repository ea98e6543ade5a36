"""Ranks on a mesh: healthy ones pass, a stuck one is named with its place in the mesh."""

from __future__ import annotations

import pytest

from .conftest import PROGRAMS

PROGRAM = PROGRAMS / "meshes.py"
# kind, ranks, the rank that stops, and what it is called.
MESHES = {
    "ddp": (4, 2, "rank 2"),
    "hsdp": (4, 3, "rank 3 (dp=1 shard=1)"),
    "tensor": (2, 1, "rank 1 (tp=1)"),
    "pipeline": (2, 1, "rank 1 (pp=1)"),
}
QUICK = [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "tensor", "pipeline")), "hsdp"]
FEW_RANKS = [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "hsdp", "tensor")), "pipeline"]


def line_of(text: str) -> int:
    """The last line that holds it."""
    return max(number for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1) if text in line)


@pytest.mark.parametrize("kind", QUICK)
def test_a_stuck_rank_is_named_with_its_place_in_the_mesh(launcher, kind):
    ranks, stuck, name = MESHES[kind]
    outcome = launcher.outcome_of_script(PROGRAM, ranks, kind, str(stuck))

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "deadlock", "lock_cycle")
    assert outcome["culprit"]["ranks"] == [stuck]
    assert outcome["victims"] == [rank for rank in range(ranks) if rank != stuck]
    assert (outcome["culprit"]["place"]["line"], outcome["culprit"]["step"]) == (line_of("self.lock.acquire()"), 2)
    assert outcome["summary"].startswith(name)
    assert outcome["timing"]["quiet_s"] <= 10


@pytest.mark.parametrize("kind", [pytest.param("hsdp", marks=pytest.mark.slow), "pipeline"])
def test_a_killed_rank_is_blamed_and_not_one_that_is_in_other_groups_or_on_the_other_side(launcher, kind):
    ranks, killed, _ = MESHES[kind]
    outcome = launcher.outcome_of_script(PROGRAM, ranks, kind, str(killed), "killed")

    assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "killed")
    assert outcome["culprit"]["ranks"] == [killed]


@pytest.mark.parametrize("kind", FEW_RANKS)
def test_healthy_ranks_on_a_mesh_pass(launcher, kind):
    ranks, _, _ = MESHES[kind]
    outcome = launcher.outcome_of_script(PROGRAM, ranks, kind)

    assert (outcome["verdict"], outcome["findings"]) == ("PASS", [])


@pytest.mark.slow
def test_eight_ranks_on_few_cores_pass_and_a_stuck_one_is_named(workspace):
    words = ("run", "--script", str(PROGRAM), "--ranks", "8", "--", "hsdp")
    assert workspace.harness(*words).outcome["verdict"] == "PASS"
    outcome = workspace.harness(*words, "5").outcome

    assert (outcome["verdict"], outcome["culprit"]["ranks"]) == ("HANG", [5])
    assert outcome["summary"].startswith("rank 5 (dp=2 shard=1)")
