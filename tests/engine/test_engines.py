"""What every engine promises: one suite for this machine, a list of hosts, and a real Slurm cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nsa_harness.engine import engine_named
from nsa_harness.engine.interface import OUTPUT, Engine, EngineError, Job, JobHandle, JobState, JobStatus
from nsa_harness.engine.site import Site, place_of_setting, read_site
from nsa_harness.errors import ScenarioError, UsageError
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from tools.slurm_lab import wait_until

ENGINES = ["local", "hosts", pytest.param("slurm", marks=pytest.mark.cluster)]
SITES = {
    "local": Site(),
    "hosts": Site(hosts={"h1": None, "h2": None}, launcher="env HOST_NAME={host}"),
    "slurm": Site(),
}
MARK = "NSA_TEST_OF_ENGINES"


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "slurm":
        request.getfixturevalue("cluster")
    return engine_named(request.param, SITES[request.param])


@pytest.fixture
def job(engine: Engine, tmp_path: Path) -> Callable[[str], Job]:
    """Return a job that executes a shell command on each node. Its agent is `env`, which just starts the command."""
    directory = tmp_path / "job"
    directory.mkdir()

    def make(command: str) -> Job:
        return Job(
            name=f"test-{os.getpid()}-{tmp_path.name}", directory=directory, nodes=1 if engine.name == "local" else 2,
            ranks_per_node=1, agent=("env",), torchrun=(), as_module=False, program=("bash", "-c", command),
            env={MARK: str(tmp_path), "A_WORD": "two words, 'quotes' and $dollars"}, cwd=tmp_path, limit_s=600.0,
            site=SITES[engine.name],
        )  # fmt: skip

    return make


def submit(engine: Engine, job: Job) -> JobHandle:
    script = engine.render(job)
    script.file.write_text(script.text)
    return engine.submit(script, os.environ)


def end_of(engine: Engine, handle: JobHandle) -> JobStatus:
    wait_until(lambda: engine.poll(handle).state.has_ended, "the job did not end")
    return engine.poll(handle)


def output(job: Job) -> str:
    return (job.directory / OUTPUT).read_text()


def processes_of(tmp_path: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_the_engine_can_be_used_and_knows_its_nodes(engine: Engine) -> None:
    capabilities = engine.capabilities()
    assert capabilities.missing == ""
    assert capabilities.nodes == (1 if engine.name == "local" else 2)


def test_a_script_is_the_same_each_time_and_valid_for_the_shell(engine: Engine, job: Callable[[str], Job]) -> None:
    script = engine.render(job("true"))
    assert script == engine.render(job("true"))
    assert not script.file.exists()
    subprocess.run(["bash", "-n"], input=script.text, text=True, check=True)


def test_torchrun_meets_on_one_address(engine: Engine, job: Callable[[str], Job]) -> None:
    with_ranks = replace(job(""), torchrun=("python", "-m", "torch.distributed.run"), ranks_per_node=3)
    text = engine.render(with_ranks).text
    assert f"--nnodes={with_ranks.nodes} --nproc-per-node=3" in text
    assert "--rdzv-backend=c10d" in text


def test_a_job_runs_once_on_each_node_with_its_variables_and_directory(
    engine: Engine, job: Callable[[str], Job], tmp_path: Path
) -> None:
    wanted = job('echo "in $PWD: $A_WORD"')
    status = end_of(engine, submit(engine, wanted))
    assert (status.state, status.exit_code) == (JobState.COMPLETED, 0)
    assert output(wanted).count(f"in {tmp_path}: two words, 'quotes' and $dollars") == wanted.nodes


def test_a_job_that_fails_has_its_exit_code(engine: Engine, job: Callable[[str], Job]) -> None:
    status = end_of(engine, submit(engine, job("exit 7")))
    assert (status.state, status.exit_code) == (JobState.FAILED, 7)


def test_a_handle_is_json_and_the_job_is_found_without_it(
    engine: Engine, job: Callable[[str], Job], tmp_path: Path
) -> None:
    wanted = job(f"until [ -e {shlex.quote(str(tmp_path))}/go ]; do sleep 0.1; done")
    handle = submit(engine, wanted)
    again = type_adapter(JobHandle).validate_json(json_text(handle))
    other = engine_named(engine.name, SITES[engine.name])
    wait_until(lambda: other.poll(again).state is JobState.RUNNING, "the job did not start")
    wait_until(lambda: other.find(other.render(wanted)) is not None, "the job was not found")
    found = other.find(other.render(wanted))
    assert found is not None
    assert found.id == handle.id
    (tmp_path / "go").touch()
    assert end_of(other, again).state is JobState.COMPLETED


def test_a_command_runs_on_each_node_of_a_running_job(
    engine: Engine, job: Callable[[str], Job], tmp_path: Path
) -> None:
    wanted = job("sleep 300 & echo started; wait")
    handle = submit(engine, wanted)
    wait_until(
        lambda: (wanted.directory / OUTPUT).exists() and output(wanted).count("started") == wanted.nodes, "no start"
    )
    outputs = list(engine.exec_on_nodes(handle, ["bash", "-c", "echo 'on a node'; exit 3"]))
    assert [(one.text, one.status) for one in outputs] == [("on a node\n", 3)] * wanted.nodes
    assert len({one.node for one in outputs}) == wanted.nodes
    engine.cancel(handle)
    assert end_of(engine, handle).state is JobState.CANCELLED
    wait_until(lambda: processes_of(tmp_path) == [], "a process of the job is left")


def test_a_job_can_be_cancelled_after_its_end(engine: Engine, job: Callable[[str], Job]) -> None:
    handle = submit(engine, job("true"))
    end_of(engine, handle)
    engine.cancel(handle)
    assert engine.poll(handle).state is JobState.COMPLETED


def test_an_unknown_job_is_lost(engine: Engine, job: Callable[[str], Job]) -> None:
    handle = submit(engine, job("true"))
    end_of(engine, handle)
    (job("true").directory / "job.exit").unlink(missing_ok=True)
    assert engine.poll(replace(handle, id="999999")).state is JobState.LOST


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_slurm_says_why_it_refuses_a_job(tmp_path: Path) -> None:
    site = Site(partition="mian")
    engine = engine_named("slurm", site)
    assert dict(engine.mistakes(1, 0)) == {
        "partition": 'no partition "mian"; there are main, short, urgent; did you mean "main"?'
    }
    impossible = Job(
        name="test-refused", directory=tmp_path, nodes=1, ranks_per_node=1, agent=("env",), torchrun=(),
        as_module=False, program=("true",), env={}, cwd=tmp_path, limit_s=None, site=site,
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"[Ii]nvalid partition"):
        submit(engine, impossible)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_settings_that_the_cluster_cannot_fulfil_are_found_before_anything_is_submitted() -> None:
    site = Site(partition="short", time_limit="04:00:00", cpus_per_node=9, constraint="a100&[ib*2]")
    mistakes = list(engine_named("slurm", site).mistakes(1, 0))
    assert [key for key, _ in mistakes] == ["time_limit", "cpus_per_node", "constraint", "constraint"]
    assert mistakes[0][1] == "04:00:00, but the partition short gives a job at most 60.0 s"
    assert mistakes[1][1] == "9, but a node of the partition short has at most 2 cores"
    assert mistakes[2][1].startswith('no node of the partition short has the feature "a100"; its nodes have no')
    assert list(engine_named("slurm", Site(time_limit="2-12", cpus_per_node=2)).mistakes(2, 4)) == []


def test_directives_of_slurm_come_from_the_site_and_the_job(tmp_path: Path) -> None:
    site = Site(
        partition="gpu", account="lab", constraint="a100", directives=("--qos=high",), setup=("module load cuda",),
        srun=("--mpi=none",), env={"NCCL_SOCKET_IFNAME": "ib0"},
    )  # fmt: skip
    job = Job(
        name="x", directory=tmp_path, nodes=4, ranks_per_node=8, agent=("nsa-harness", "watch"), torchrun=("torchrun",),
        as_module=True, program=("pkg.train", "--n=1"), env={"A": "b c"}, cwd=Path("/data/my project"), limit_s=600.0,
        gpus_per_node=8, site=site,
    )  # fmt: skip
    text = engine_named("slurm", site).render(job).text
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=x", "--nodes=4", "--ntasks-per-node=1", f"--output={tmp_path}/{OUTPUT}",
        "--chdir='/data/my project'", "--no-requeue", "--open-mode=append", "--partition=gpu", "--account=lab",
        "--constraint=a100", "--gpus-per-node=8", "--time=15", "--qos=high",
    ]  # fmt: skip
    assert "set -e\nmodule load cuda\nset +e\nexport NCCL_SOCKET_IFNAME=ib0\nexport A='b c'\n" in text
    assert text.endswith('"--rdzv-endpoint=$endpoint" \\\n  -m -- pkg.train --n=1\n')


def test_an_unknown_engine_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match=r"no engine 'slurn'; did you mean \"slurm\".*local, hosts, slurm"):
        engine_named("slurn", Site())


def test_mistakes_of_a_site_file_have_lines_and_suggestions(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("partiton: gpu\nnodes: many\nenv: {1A: x}\ndirectives: [qos=high]\ntime_limit: 04:00 h\n")
    with pytest.raises(ScenarioError) as error:
        read_site(file)
    lines = [line.removeprefix(f"{tmp_path}/") for line in error.value.mistakes]
    assert lines[0] == 'site.yaml:1:1: partiton: unknown key; did you mean "partition"?'
    assert lines[1] == 'site.yaml:2:1: nodes: expected a whole number, got "many"'
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3", "4", "5"]
    assert lines[3].endswith('expected an option of sbatch, such as --qos=high, got "qos=high"')
    assert lines[4].endswith('expected minutes ("90"), hours ("04:00:00"), or days and hours ("2-12"), got "04:00 h"')
    assert place_of_setting(file, "nodes") == f"{file}:2:1"
    assert place_of_setting(file, "partition") is None


def test_a_site_file_may_set_everything(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("schema: 1\nnodes: 2\npartition: gpu\nhosts: {h1: 10.0.0.1, h2: null}\nlauncher: rsh {host}\n")
    assert read_site(file) == Site(
        nodes=2, partition="gpu", hosts={"h1": "10.0.0.1", "h2": None}, launcher="rsh {host}"
    )


def test_a_launcher_without_a_host_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("launcher: ssh node1\n")
    with pytest.raises(ScenarioError, match=r"launcher: expected a command with \{host\}"):
        read_site(file)
