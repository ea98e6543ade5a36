"""`lock` and `run --locked` over real DDP, FSDP2 and tensor parallel steps."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.commands.attempt import run_one
from nsa_harness.commands.run import locked
from nsa_harness.core.comparison.communication import Group, Lock, Operation, Role
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import Outcome
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.comm_lock import lock_text, parse_lock, recorded, with_large_recorder
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run

from .conftest import LIMIT_S, PROGRAMS, Undisturbed, Workspace, forget_the_test

PROGRAM = PROGRAMS / "communicates.py"
HARMLESS = (
    ("def metrics", "\n\n# The lines below have moved.\ndef metrics"),
    ("batch = torch.randn", "inputs = torch.randn"),
    ("model(batch)", "model(inputs)"),
    ("SEED = 64, 8, 4, 0", "SEED = 64, 8, 5, 17"),
    ("        loss.backward()", "        print('loss', float(loss))\n        loss.backward()"),
)
DIFFERENCES = {"ddp": "bucket", "fsdp": "dtype", "tensor": "gather"}


def carry_out(
    directory: Path, server: ForkServer, program: Path, *args: str, ranks: int = 2, file: Path | None = None
) -> tuple[Outcome, AttemptDir]:
    script = Script(file=str(program), ranks=ranks, args=args)
    (spec,) = plan_launches(
        Invocation(arguments=(), script=script, working_dir=directory, environ={}), machine_facts()
    ).specs
    assert isinstance(spec, RunSpec)
    spec = with_large_recorder(spec) if file is None else locked(spec, file)
    run = create_run(directory / "reports")
    attempt = run.attempt(spec.scenario, 1)
    forget_the_test()
    outcome = run_one(
        replace(spec, launcher=Launcher.FORK), attempt, number=1, probe="full", facts=machine_facts(),
        notify=lambda _: None, interruption=Undisturbed(), log=run.log, server=server,
    )  # fmt: skip
    return outcome, attempt


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor"])
def test_harmless_changes_are_none_and_a_harmful_one_is_told(kind: str, tmp_path: Path, server: ForkServer) -> None:
    _, attempt = carry_out(tmp_path, server, PROGRAM, kind)
    file = tmp_path / "communicates.comm.lock"
    file.write_text(lock_text(Lock(ranks=2, roles=recorded(attempt, 2).roles)))
    text = PROGRAM.read_text()
    for old, new in HARMLESS:
        assert old in text
        text = text.replace(old, new)
    edited = tmp_path / "communicates.py"
    edited.write_text(text)
    outcome, _ = carry_out(tmp_path, server, edited, kind, file=file)
    assert outcome.verdict.status == "PASS", outcome.verdict.summary
    assert "a step communicates as communicates.comm.lock says" in outcome.passed_checks
    outcome, _ = carry_out(tmp_path, server, PROGRAM, kind, DIFFERENCES[kind], file=file)
    assert (outcome.verdict.status, outcome.verdict.cause) == ("FAIL", "expectation_missed")
    assert "communicates.comm.lock" in outcome.verdict.summary


def test_a_lock_holds_for_another_world_size(tmp_path: Path, server: ForkServer) -> None:
    _, attempt = carry_out(tmp_path, server, PROGRAM, "fsdp")
    file = tmp_path / "fsdp.comm.lock"
    file.write_text(lock_text(Lock(ranks=2, roles=recorded(attempt, 2).roles)))
    (role,) = parse_lock(file.read_text(), "fsdp").roles
    assert {name for one in role.operations for name in one.group.names} == {"dp", "world"}
    outcome, _ = carry_out(tmp_path, server, PROGRAM, "fsdp", ranks=3, file=file)
    assert outcome.verdict.status == "PASS", outcome.verdict.summary


STEPS = """\
import pytest
import torch
import torch.distributed as dist

@pytest.mark.ranks(2, locked="step.comm.lock")
@pytest.mark.parametrize("times", [1, 2])
def test_step(times):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    for _ in range(4):
        parameter.sum().backward()
        for _ in range(times):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_test_on_several_ranks_is_compared_with_a_file(tmp_path: Path) -> None:
    reduction = Operation(
        group=Group(names=("world",), size=2),
        op="all_reduce",
        dtype="float32",
        elements=3,
        site="test_steps.py test_step",
    )
    lock = Lock(ranks=2, roles=(Role(who="all", operations=(reduction,)),))
    (tmp_path / "step.comm.lock").write_text(lock_text(lock))
    (tmp_path / "test_steps.py").write_text(STEPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "nsa_harness.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "test_steps.py",
    ]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert (
        "does not communicate as step.comm.lock says: 1 call added; 12 bytes per step and rank became 24" in ran.stdout
    )


@pytest.mark.slow
def test_the_command_writes_the_file_and_a_later_run_is_compared_with_it(workspace: Workspace) -> None:
    script = workspace.directory / "train.py"
    script.write_text(PROGRAM.read_text())
    ran = workspace.harness("lock", "train.py", "--", "ddp")
    assert ran.code == 0, ran.out + ran.err
    assert "wrote train.comm.lock" in ran.out
    assert (
        "  2 x world  all_reduce     float32          16,576  (below Python)\n"
        in (workspace.directory / "train.comm.lock").read_text()
    )
    ran = workspace.harness("run", "train.py", "--locked", "--", "ddp", "extra")
    assert ran.code == 1
    shown = ran.out[ran.out.index("FAIL") :].splitlines()
    assert len(shown) <= 24
    assert any("added" in line and "all_reduce" in line and "train.py metrics" in line for line in shown), ran.out
    assert os.path.exists(ran.run_dir / "report.html")
