"""`lock` and `run --locked` over real DDP, FSDP2 and tensor parallel steps."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.core.comparison.communication import Lock
from nsa_harness.core.plan import LockedSchedule
from nsa_harness.core.report import Outcome
from nsa_harness.supervisor.launch.planning import Script
from nsa_harness.supervisor.storage.comm_lock import (
    lock_text,
    parse_lock,
    recorded,
    schedule_misses,
    with_large_recorder,
)
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import SPEC, AttemptDir

from .conftest import PROGRAMS, Forks, Workspace
from .test_pytest_plugin import run_pytest

PROGRAM = PROGRAMS / "communicates.py"
HARMLESS = (
    ("def metrics", "\n\n# The lines below have moved.\ndef metrics"),
    ("batch = torch.randn", "inputs = torch.randn"),
    ("model(batch)", "model(inputs)"),
    ("SEED = 64, 8, 4, 0", "SEED = 64, 8, 5, 17"),
    ("        loss.backward()", "        print('loss', float(loss))\n        loss.backward()"),
)
DIFFERENCES = {"ddp": "bucket", "fsdp": "dtype", "tensor": "gather"}


def record(forks: Forks, kind: str, file: Path) -> None:
    """Write the communication of a step to the file."""
    answer = forks.run(script=Script(file=str(PROGRAM), ranks=2, args=(kind,)), change=with_large_recorder)
    attempt = AttemptDir(answer.path / answer.outcome.dir)
    file.write_text(lock_text(Lock(ranks=2, roles=recorded(attempt, 2).roles)))


def compare(forks: Forks, file: Path, program: Path, *args: str, ranks: int = 2) -> Outcome:
    return forks.run(script=Script(file=str(program), ranks=ranks, args=args), locked=file).outcome


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor"])
def test_harmless_changes_are_none_and_a_harmful_one_is_told(kind: str, tmp_path: Path, forks: Forks) -> None:
    file = tmp_path / "communicates.comm.lock"
    record(forks, kind, file)
    text = PROGRAM.read_text()
    for old, new in HARMLESS:
        assert old in text
        text = text.replace(old, new)
    edited = tmp_path / "communicates.py"
    edited.write_text(text)
    outcome = compare(forks, file, edited, kind)
    assert outcome.verdict.status == "PASS", outcome.verdict.summary
    assert "a step communicates as communicates.comm.lock says" in outcome.passed_checks
    outcome = compare(forks, file, PROGRAM, kind, DIFFERENCES[kind])
    assert (outcome.verdict.status, outcome.verdict.cause) == ("FAIL", "expectation_missed")
    assert "communicates.comm.lock" in outcome.verdict.summary


def test_a_lock_holds_for_another_world_size(tmp_path: Path, forks: Forks) -> None:
    file = tmp_path / "fsdp.comm.lock"
    record(forks, "fsdp", file)
    (role,) = parse_lock(file.read_text(), "fsdp").roles
    assert {name for one in role.operations for name in one.group.names} == {"dp", "world"}
    outcome = compare(forks, file, PROGRAM, "fsdp", ranks=3)
    assert outcome.verdict.status == "PASS", outcome.verdict.summary


PIPELINE = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
ahead = int(sys.argv[1])
for _ in range(4):
    batch = torch.ones(2, 4)
    if rank > 0:
        dist.recv(batch, src=rank - 1)
    output = layer(batch)
    if rank < size - 1:
        dist.isend(output.detach(), dst=rank + 1).wait()
    exchanged = torch.ones(3)
    sent = dist.P2POp(dist.isend, torch.ones(3), (rank + ahead) % size)
    received = dist.P2POp(dist.irecv, exchanged, (rank - ahead) % size)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    output.sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_another_peer_in_a_pipeline_is_told_and_moved_lines_are_not(tmp_path: Path, forks: Forks) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    file = tmp_path / "pipeline.comm.lock"
    answer = forks.run(script=Script(file=str(script), ranks=3, args=("1",)), change=with_large_recorder)
    attempt = AttemptDir(answer.path / answer.outcome.dir)
    file.write_text(lock_text(Lock(ranks=3, roles=recorded(attempt, 3).roles)))
    calls = [re.sub(" +", " ", line).strip() for line in file.read_text().splitlines()]
    assert "1 x world recv from previous = rank 0 float32 8 pipeline.py <module> # line 13" in calls, calls
    assert "1 x world isend to next = last float32 3 pipeline.py <module> # line 20" in calls, calls
    for peers, differ in ((", with peers", True), ("", False)):  # the second is as an earlier version wrote it
        schedule = LockedSchedule(file="a", text=f"comm.lock 1\nranks 3{peers}\nrole all: 0 calls, 0 bytes\n  step:\n")
        spec = load_spec(attempt.path / SPEC)
        spec = replace(spec, expect=replace(spec.expect, communication=schedule))
        assert bool(schedule_misses(attempt, spec)) is differ
    script.write_text("# This line moves the others.\n" + PIPELINE.replace("exchanged", "halo"))
    outcome = compare(forks, file, script, "2", ranks=3)
    assert (outcome.verdict.status, outcome.verdict.cause) == ("FAIL", "expectation_missed")
    assert "2 calls changed" in outcome.verdict.summary, outcome.verdict.summary


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
    (tmp_path / "test_steps.py").write_text(STEPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = run_pytest(tmp_path, "test_steps.py", "-k", "test_step[1]")
    assert "step.comm.lock: No such file or directory; `pytest --nsa-lock` records a healthy run in it" in ran.stdout
    assert "Traceback" not in ran.stdout
    assert " in write_lock" not in ran.stdout
    assert run_pytest(tmp_path, "test_steps.py", "-k", "test_step[1]", "--nsa-lock").returncode == 0
    reduction = "      1 x world  all_reduce     float32               3  test_steps.py test_step"
    assert reduction in (tmp_path / "step.comm.lock").read_text()
    ran = run_pytest(tmp_path, "test_steps.py")
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
