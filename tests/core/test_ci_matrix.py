"""The matrix of a nightly: what becomes a job, how long it may take, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from builders import spec

from nsa_harness.core import ci
from nsa_harness.core.ci import Axes, Offer, RunnerKind, axes, matrix, of_another_backend, without
from nsa_harness.core.doctor.checkup import OLDEST_TORCH
from nsa_harness.core.plan import Limits, RunSpec, Skip
from nsa_harness.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


def asked(**changes: Any) -> Axes:
    nothing: dict[str, Any] = dict.fromkeys(("shards", "torch", "gpus", "backends", "runner"))
    return axes(**{"tags": (), "cpu": False, **nothing, **changes})


def launch(deadline_s: float = 600.0) -> RunSpec:
    return spec(limits=Limits(deadline_s=deadline_s))


SKIP = Skip(scenario="ddp_nccl", about="", reason="NCCL needs a GPU for each of 2 ranks; this machine has 1 GPU")


def offers(wanted: Axes, launches: Sequence[RunSpec | Skip]) -> dict[RunnerKind, Offer]:
    return {kind: Offer(shards=(tuple(launches),) * wanted.shards) for kind in wanted.kinds()}


def test_the_matrix_is_shard_by_backend_by_torch_by_gpus() -> None:
    wanted = asked(shards=3)
    jobs = matrix(wanted, offers(wanted, [launch()])).jobs
    combinations = {(job.shard, job.backend, job.torch, job.gpus) for job in jobs}
    assert combinations == set(product(("1/3", "2/3", "3/3"), ("gloo", "nccl"), ("2.11", "2.13"), (1, 2)))
    assert len({job.name for job in jobs}) == len(jobs) == 24


def test_the_cpu_matrix_needs_nothing_but_a_hosted_runner() -> None:
    wanted = asked(cpu=True)
    jobs = matrix(wanted, offers(wanted, [launch()])).jobs
    assert [(job.shard, job.backend, job.torch, job.gpus) for job in jobs] == [
        ("1/2", "gloo", "2.13", 0),
        ("2/2", "gloo", "2.13", 0),
    ]
    assert {(job.runner, job.tests) for job in jobs} == {(("ubuntu-latest",), "")}


def test_an_entry_holds_all_that_a_job_needs() -> None:
    wanted = asked(tags=("plan", "ddp"), shards=1, torch="2.12.1", gpus="2", backends="nccl")
    (job,) = matrix(wanted, offers(wanted, [launch(600.0), launch(90.0), SKIP])).jobs
    assert asdict(job) == {
        "name": "plan+ddp-1of1-nccl-2gpu-torch2.12.1",
        "tags": "plan ddp",
        "expression": "",
        "shard": "1/1",
        "backend": "nccl",
        "torch": "2.12.1",
        "gpus": 2,
        "runner": ("self-hosted", "linux", "gpu-2"),
        "tests": "gpu or multi_gpu",
        "run_minutes": 14,  # 600 + 90 and 60 for each of the two, in whole minutes
        "timeout_minutes": 64,
    }


def test_a_job_may_take_longer_than_every_deadline_in_it_together() -> None:
    wanted = asked(shards=1)
    for job in matrix(wanted, offers(wanted, [launch(601.0)] * 7)).jobs:
        assert job.run_minutes * 60 > 7 * 601
        assert job.timeout_minutes > job.run_minutes


def test_a_job_that_github_would_end_first_is_refused_with_the_way_out() -> None:
    wanted = asked(shards=1)
    with pytest.raises(UsageError, match=r"may take 341 minutes by their own deadlines.* limit of 360.*--shards"):
        matrix(wanted, offers(wanted, [launch(1800.0)] * 11))
    assert {job.timeout_minutes for job in matrix(wanted, offers(wanted, [launch(1800.0)] * 10)).jobs} == {360}


def test_more_jobs_than_github_starts_are_refused() -> None:
    wanted = asked(shards=33)
    with pytest.raises(UsageError, match="264 jobs, and GitHub starts 256 at most"):
        matrix(wanted, offers(wanted, [launch()]))


def test_what_could_only_skip_gets_no_job_and_is_said() -> None:
    wanted = asked(shards=1, gpus="1")
    found = matrix(
        wanted, {**offers(wanted, [launch()]), RunnerKind(backend="nccl", gpus=1): Offer(shards=((SKIP, SKIP),))}
    )
    assert {job.backend for job in found.jobs} == {"gloo"}
    assert found.left_out == (
        "shard 1/1 of nccl with 1 GPU has no job: every scenario in it would be SKIP: "
        "ddp_nccl: NCCL needs a GPU for each of 2 ranks; this machine has 1 GPU",
    )


def test_a_scenario_that_names_another_backend_is_left_out_by_name_and_said() -> None:
    named = [spec(scenario=f"ddp_{name}", settings=(("needs.backend", name),)) for name in ("gloo", "nccl")]
    assert of_another_backend([launch(), *named], "nccl") == ("ddp_gloo",)
    wanted = asked(shards=1, gpus="2", backends="nccl", torch="2.13")
    offer = Offer(shards=((launch(),),), left_out=("ddp_gloo", "fsdp_gloo"))
    found = matrix(wanted, {RunnerKind(backend="nccl", gpus=2): offer})
    assert [job.expression for job in found.jobs] == ["not ddp_gloo and not fsdp_gloo"]
    assert found.left_out == ("nccl with 2 GPUs leaves out what names another backend: ddp_gloo, fsdp_gloo",)
    assert without(()) is None


def test_a_matrix_without_a_job_is_an_error() -> None:
    wanted = asked()
    with pytest.raises(UsageError, match="no job is left"):
        matrix(wanted, offers(wanted, [SKIP]))


def test_gpu_tests_run_once_for_each_torch_and_number_of_gpus() -> None:
    wanted = asked(shards=2, gpus="0,1,2")
    jobs = matrix(wanted, offers(wanted, [launch()])).jobs
    tested = {(job.torch, job.gpus): job.tests for job in jobs if job.tests}
    assert tested == {
        ("2.11", 1): "gpu",
        ("2.13", 1): "gpu",
        ("2.11", 2): "gpu or multi_gpu",
        ("2.13", 2): "gpu or multi_gpu",
    }
    assert sum(bool(job.tests) for job in jobs) == len(tested)


def test_a_runner_of_ones_own_is_named_in_one_place() -> None:
    wanted = asked(shards=1, gpus="0,4", runner="big, h200-{gpus}x")
    jobs = matrix(wanted, offers(wanted, [launch()])).jobs
    assert {job.gpus: job.runner for job in jobs} == {0: ("ubuntu-latest",), 4: ("big", "h200-4x")}


def test_the_default_versions_are_the_oldest_allowed_and_the_one_that_was_tested() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    oldest, newest = ci.TORCH_VERSIONS
    assert "torch" in project["dependencies"], "a script of somebody else's brings the version that it wants"
    assert oldest == ".".join(map(str, OLDEST_TORCH))
    assert f"torch=={newest}." in (REPOSITORY / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"torch": "2.13,two"}, '--torch "2.13,two": expected versions such as 2.11,2.13, got "two"'),
        ({"torch": "2.10"}, '--torch "2.10": the harness needs torch 2.11 or newer, got "2.10"'),
        ({"gpus": "1,,2"}, '--gpus "1,,2": expected numbers from 0 to 16 such as 1,2, got ""'),
        ({"gpus": "17"}, '--gpus "17": expected numbers from 0 to 16 such as 1,2, got "17"'),
        ({"backends": "ncl"}, '--backend "ncl": expected gloo, nccl or auto, got "ncl"; did you mean "nccl"?'),
        (
            {"cpu": True, "gpus": "2"},
            '--cpu is the matrix without GPUs; --gpus "2" cannot go with it; give one of the two',
        ),
        (
            {"runner": "gpu,$(x)"},
            '--runner "gpu,$(x)": "$(x)" is no label; expected labels of letters, digits and _ . - '
            "with commas between them; {gpus} stands for the number of GPUs",
        ),
    ],
)
def test_a_wrong_option_is_told_with_what_was_expected(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        asked(**option)
    assert str(raised.value) == message


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        asked(torch="x", gpus="y", backends="z", runner="?")
    assert [line.split()[0] for line in str(raised.value).splitlines()] == [
        "--torch",
        "--gpus",
        "--backend",
        "--runner",
    ]
