"""The end of a job that the controller of Slurm has forgotten, as a real accounting database knows it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsa_harness.engine import engine_named
from nsa_harness.engine.interface import Engine, Job, JobHandle, JobState, JobStatus
from nsa_harness.engine.site import Site
from tools.slurm_lab import SlurmLab, missing_reason, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A cluster with accounting, whose controller forgets a job soon after its end."""
    if reason := missing_reason(accounting=True):
        pytest.skip(reason)
    home = Path(tempfile.mkdtemp(prefix="nsa-slurm-", dir="/tmp"))
    home.chmod(0o755)
    lab = SlurmLab(home=home, node_timeout_s=5, forget_s=2, accounting=True)
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(home)
        assert lab.processes() == []


def test_accounting_knows_how_a_forgotten_job_ended(cluster: SlurmLab, tmp_path: Path) -> None:
    engine = engine_named("slurm", Site())
    long = submitted(tmp_path / "cancelled", "sleep 900")
    on_node = submitted(tmp_path / "node_fail", "sleep 900", only=("n2",))
    preempted = submitted(tmp_path / "preempted", "sleep 900", only=("n1",))
    limited = submitted(tmp_path / "timeout", "sleep 900", site=Site(partition="short"))
    handles = {
        JobState.COMPLETED: submitted(tmp_path / "completed", "true"),
        JobState.FAILED: submitted(tmp_path / "failed", "exit 7"),
        JobState.CANCELLED: long,
        JobState.NODE_FAIL: on_node,
        JobState.PREEMPTED: preempted,
        JobState.TIMEOUT: limited,
    }
    wait_for(lambda: runs(engine, long), "the job to cancel does not run")
    engine.cancel(long)
    wait_for(lambda: engine.poll(limited).state is JobState.TIMEOUT, "the limit of a minute did not end the job")
    wait_for(lambda: runs(engine, on_node) and runs(engine, preempted), "not running")
    cluster.kill_node("n2")
    try:
        wait_for(lambda: engine.poll(on_node).state is JobState.NODE_FAIL, "the node did not fail")
    finally:
        cluster.start_node("n2")
    urgent = submitted(tmp_path / "urgent", "true", site=Site(partition="urgent"), only=("n1",), exclusive=True)
    wait_for(lambda: engine.poll(urgent).state is JobState.COMPLETED, "the urgent job did not run")
    wait_for(lambda: not any(map(controller_knows(cluster), handles.values())), "the controller knows a job")
    ends = {state: engine.poll(handle) for state, handle in handles.items()}
    assert {state: end.state for state, end in ends.items()} == {state: state for state in handles}
    assert ends[JobState.FAILED].exit_code == 7
    assert ends[JobState.NODE_FAIL] == JobStatus(
        state=JobState.NODE_FAIL, reason="a node of the job failed", exit_code=ends[JobState.NODE_FAIL].exit_code,
        nodes="n2",
    )  # fmt: skip
    assert engine.poll(JobHandle(engine="slurm", id="4711", directory="/")).state is JobState.LOST


def submitted(
    directory: Path, command: str, *, site: Site | None = None, only: tuple[str, ...] = (), exclusive: bool = False
) -> JobHandle:
    """Submit a job that executes a shell command, and return its handle."""
    directory.mkdir()
    directives = ("--exclusive",) if exclusive else ()
    site = (site or Site()).model_copy(update={"directives": directives})
    engine = engine_named("slurm", site)
    script = engine.render(
        Job(
            name=f"test-{directory.name}", directory=directory, nodes=1, ranks_per_node=1, agent=("env",), torchrun=(),
            as_module=False, program=("bash", "-c", command), env={}, cwd=directory, limit_s=None, only=only, site=site,
        )
    )  # fmt: skip
    script.file.write_text(script.text)
    return engine.submit(script, os.environ)


def runs(engine: Engine, handle: JobHandle) -> bool:
    return engine.poll(handle).state is JobState.RUNNING


def controller_knows(cluster: SlurmLab) -> Callable[[JobHandle], bool]:
    return lambda handle: cluster.slurm("scontrol", "show", "job", handle.id) is not None


def wait_for(is_met: Callable[[], bool], otherwise: str) -> None:
    wait_until(is_met, otherwise, 300)
