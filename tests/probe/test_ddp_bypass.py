"""Training whose gradients DDP does not average: planted faults and their healthy twins, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import case, evidence, rank_evidence
from ranks import run_forks

from nsa_harness import protocol
from nsa_harness.core.diagnosis.rules.replicas import replica_divergence
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import HealthSamples

FAULTS = Path(__file__).parents[1] / "faults"


def explanation(boards: Path, *arguments: str) -> tuple[Any, list[HealthSamples]]:
    """Run a program on two ranks. Return what the rule says about their samples, or None, and the samples."""
    ranks = run_forks(2, *arguments, boards=boards)
    assert [(rank.status, rank.err) for rank in ranks] == [(0, "")] * 2
    assert not list(boards.glob("*.trouble.jsonl"))
    files = [boards / protocol.HEALTH_SAMPLES.format(pid=rank.pid) for rank in ranks]
    records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    health = [samples for each in records if (samples := read_health_samples(each)) is not None]
    cause = replica_divergence(case(evidence(*(rank_evidence(n, health=each) for n, each in enumerate(health)))))
    return cause, health


@pytest.mark.parametrize(
    ("program", "reason", "line", "parameter"),
    [
        ("bypassed", "bypassed", "model.module.loss(rows)", "body.0.0.weight"),
        ("past_ddp", "bypassed", "model(batch() + rank)", "0.0.weight"),
        ("helper_past_ddp", "bypassed", "outputs = inside(rows)", "0.0.weight"),
        ("early_copy", "unequal copy", None, "0.0.weight"),
        ("adapter_late", "added", "DistributedDataParallel(model)", "adapter.weight"),
        ("beside_ddp", "beside", "DistributedDataParallel(blocks())", "head.weight"),
        ("ddp_dropped", "", None, "0.0.weight"),
        ("by_hand", "bypassed", "model.module(rows)", "0.0.weight"),
        ("head_late", "left out", None, "head.weight"),
        ("not_written_back", "never equal again", None, "0.0.weight"),
        ("flat_sum", "", None, "0.0.bias"),
    ],
)
def test_the_line_that_leaves_gradients_out_of_ddp_is_named(
    tmp_path: Path, program: str, reason: str, line: str | None, parameter: str
) -> None:
    file = FAULTS / f"silent_replicas_{program}.py"
    one, _ = explanation(tmp_path, str(file), "fault")
    assert (one.facts["identified_by"], one.ranks, one.place.parameter) == (reason, (0, 1), parameter)
    assert one.evidence.name == ("RECORD" if reason in ("bypassed", "added") else "EFFECT")
    assert one.place.line is None if line is None else line in file.read_text().splitlines()[one.place.line - 1]


def test_buffers_that_each_rank_changes_by_its_own_data_are_named_and_may_be_meant_so(tmp_path: Path) -> None:
    found, _ = explanation(tmp_path, str(FAULTS / "silent_buffers_of_own_load.py"), "fault")
    assert (found.facts["identified_by"], found.facts["parts"], found.ranks) == ("local buffers", ("bias",), (0, 1))
    assert (found.evidence.name, [question.code for question in found.left_open]) == ("OPEN", ["local_on_purpose"])


@pytest.mark.parametrize(
    "program",
    [
        "control_past_ddp",
        *(f"silent_replicas_{name}" for name in ("bypassed", "adapter_late", "beside_ddp", "ddp_dropped")),
        "silent_replicas_helper_past_ddp",
        "silent_replicas_early_copy",
        *(f"silent_replicas_{name}" for name in ("by_hand", "head_late", "not_written_back", "flat_sum")),
        "silent_buffers_of_own_load",
    ],
)
def test_healthy_programs_are_no_finding(tmp_path: Path, program: str) -> None:
    cause, health = explanation(tmp_path, str(FAULTS / f"{program}.py"))
    assert cause is None
    replicas = [replica for each in health for replica in each.replicas]
    assert not any(sample.bypass_place for replica in replicas for sample in replica.samples)
    assert {name for replica in replicas if replica.kind == "added" for name in replica.names} == set()
