"""Every scenario that ships and can run on a CPU, run once as it is: it meets what it expects of itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches

# Without a GPU, so that every machine collects the same names.
LAPTOP = MachineFacts(host="laptop", cpus=2, gpus=(), torch="2.13.0+cpu")


@cache
def with_a_cpu_form() -> list[str]:
    question = Invocation(arguments=("*",), working_dir=Path(__file__).parent, environ={})
    return [spec.scenario for spec in plan_launches(question, LAPTOP).specs if isinstance(spec, RunSpec)]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some train 300 steps
@pytest.mark.parametrize("name", with_a_cpu_form())
def test_a_shipped_scenario_meets_its_own_expectation(workspace, name):
    process = workspace.start("run", name, CUDA_VISIBLE_DEVICES="")
    process.wait()  # as long as its own deadline allows
    ran = workspace.finished(process)
    outcome = ran.outcome

    assert (ran.code, outcome["expected"]) == (0, True), (
        f"{outcome['verdict']} {outcome['cause']}: {outcome['summary']}"
    )
