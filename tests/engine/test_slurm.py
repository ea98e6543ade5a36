"""`nsa-harness run --engine slurm` on a real cluster: healthy and faulty jobs on two nodes, and what befalls a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.slurm_lab import SlurmLab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "cluster_job.py"
COMMAND = [str(Path(sys.executable).parent / "nsa-harness"), "run"]
TWO_NODES = ["--engine", "slurm", "--nodes", "2", "--ranks", "4"]


def _default_signals() -> None:
    """Undo what nohup or a shell in the background has set for these tests, because a command inherits it."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A running `nsa-harness run`, in a directory and a session of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        with (directory / "out.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *words], cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_default_signals,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return (self.directory / "out.txt").read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.out or self.process.poll() is not None, f"no {text!r} in: {self.out}", 300)
        assert text in self.out

    def end(self) -> tuple[int, dict[str, Any]]:
        """Wait for the end of the command, and return its exit code and the outcome."""
        code = self.process.wait(timeout=300)
        report = json.loads((self.directory / "reports" / "latest" / "report.json").read_text())
        return code, report["outcomes"][-1]


@pytest.fixture
def directory(cluster: SlurmLab, tmp_path: Path) -> Iterator[Path]:
    """A directory for the runs of a test, after which no job and no process of a job is left."""
    daemons = 2 + cluster.nodes + 1  # munged, the controller and its helper
    yield tmp_path
    assert cluster.slurm("squeue", "--noheader") == ""
    wait_until(lambda: len(cluster.processes()) <= daemons, f"left: {cluster.processes()}")


def started(directory: Path, *words: str) -> Command:
    """Return a command whose job trains endlessly, once all ranks have trained."""
    command = Command(directory, str(PROGRAM), *TWO_NODES, *words, "--", "endless")
    wait_until(lambda: output(directory).count("trained") == 4, f"no training: {command.out}", 300)
    return command


def output(directory: Path) -> str:
    file = directory / "reports" / "latest" / "cluster_job" / "output.log"
    return file.read_text() if file.exists() else ""


def test_a_healthy_job_on_two_nodes_passes_however_long_it_waits_in_the_queue(
    directory: Path, cluster: SlurmLab
) -> None:
    blocker = cluster.slurm(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 900"
    )
    assert blocker is not None
    wait_until(lambda: "JobState=RUNNING" in (cluster.slurm("scontrol", "show", "job", blocker) or ""), "not running")
    command = Command(directory, str(PROGRAM), *TWO_NODES, "limits.stall_s=15", "limits.deadline_s=250")
    command.wait_for("it waits for free nodes (Resources)")
    submitted = directory / "reports" / "latest" / "cluster_job" / "job.json"
    wait_until(lambda: json.loads(submitted.read_text())["status"] is None, "not submitted")
    with pytest.raises(subprocess.TimeoutExpired):  # longer than the limit of a stall: the queue is no hang
        command.process.wait(timeout=16)
    cluster.slurm("scancel", blocker)
    code, outcome = command.end()
    assert (code, outcome["verdict"]) == (0, "PASS"), command.out
    assert "stall" not in command.out.split(" running: ")[0]
    assert outcome["exit_codes"] == {"0": 0, "1": 0, "2": 0, "3": 0}
    assert json.loads(submitted.read_text())["queue_s"] > 15


def test_a_deadlock_of_one_remote_rank_is_found_with_node_rank_and_line(directory: Path) -> None:
    command = Command(directory, str(PROGRAM), *TWO_NODES, "limits.stall_s=10", "--", "deadlock")
    code, outcome = command.end()
    assert (code, outcome["verdict"], outcome["kind"]) == (124, "HANG", "deadlock"), command.out
    assert outcome["culprit"]["ranks"] == [3]
    line = next(number for number, text in enumerate(PROGRAM.read_text().splitlines(), 1) if "broadcast" in text)
    assert f"cluster_job.py:{line}" in outcome["summary"]
    assert "3 (n1)" in outcome["summary"] or "3 (n2)" in outcome["summary"]


def test_a_killed_rank_is_the_culprit(directory: Path) -> None:
    code, outcome = Command(directory, str(PROGRAM), *TWO_NODES, "--", "killed").end()
    assert (code, outcome["verdict"], outcome["cause"]) == (1, "FAIL", "killed")
    assert outcome["culprit"]["ranks"] == [3]


def test_a_job_that_somebody_cancels_is_no_fault_of_the_program(directory: Path, cluster: SlurmLab) -> None:
    command = started(directory)
    cluster.slurm("scancel", "--user=root")
    code, outcome = command.end()
    assert (code, outcome["verdict"], outcome["cause"]) == (125, "ERROR", "infra")
    assert "somebody cancelled the job" in outcome["summary"]


def test_an_interrupted_command_cancels_its_job(directory: Path) -> None:
    command = started(directory)
    command.process.send_signal(signal.SIGINT)
    code, outcome = command.end()
    assert (code, outcome["cause"]) == (130, "interrupted")
    assert "was cancelled, because nsa-harness was interrupted" in outcome["summary"]


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_job_outlives_the_terminal_and_is_followed_again(directory: Path, cluster: SlurmLab, number: int) -> None:
    command = started(directory)
    os.kill(command.process.pid, number)
    command.process.wait(timeout=60)
    assert cluster.slurm("squeue", "--noheader", "--format=%T") == "RUNNING"
    shown = subprocess.run([COMMAND[0], "top"], cwd=directory, capture_output=True, text=True, check=True).stdout
    assert "running: n[1-2]" in shown
    again = Command(directory, "--resume")
    wait_until(lambda: again.out.count("running: n[1-2]") == 2, "not followed again", 120)
    (directory / "stop").touch()
    code, outcome = again.end()
    assert (code, outcome["verdict"], outcome["attempt"]) == (0, "PASS", 1)


@pytest.mark.slow
def test_a_node_that_fails_is_no_fault_of_the_program_and_the_job_is_repeated(
    directory: Path, cluster: SlurmLab
) -> None:
    command = started(directory, "--retries-infra", "1")
    cluster.kill_node("n2")
    try:
        command.wait_for("node_fail")
        (directory / "stop").touch()
    finally:
        cluster.start_node("n2")
    code, outcome = command.end()
    report = json.loads((directory / "reports" / "latest" / "report.json").read_text())
    first = report["outcomes"][0]
    assert (first["verdict"], first["cause"], first["final"]) == ("ERROR", "infra", False)
    assert "a node of the job failed" in first["summary"]
    assert (code, outcome["attempt"], outcome["verdict"]) == (0, 2, "PASS")


def preempt(cluster: SlurmLab) -> str:
    """Submit a job of the partition with the higher priority, which needs both nodes, and wait until it runs."""
    job = cluster.slurm(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 900",
    )  # fmt: skip
    assert job is not None
    wait_until(lambda: "JobState=RUNNING" in (cluster.slurm("scontrol", "show", "job", job) or ""), "not running", 120)
    return job


@pytest.mark.slow
def test_a_preempted_job_is_no_fault_of_the_program_and_is_repeated(directory: Path, cluster: SlurmLab) -> None:
    command = started(directory, "--retries-infra", "1")
    urgent = preempt(cluster)
    command.wait_for("preempted")
    (directory / "stop").touch()
    cluster.slurm("scancel", urgent)
    code, outcome = command.end()
    report = json.loads((directory / "reports" / "latest" / "report.json").read_text())
    first = report["outcomes"][0]
    assert (first["verdict"], first["cause"], first["final"]) == ("ERROR", "infra", False)
    assert "Slurm ended the job for one with a higher priority" in first["summary"]
    assert (code, outcome["attempt"], outcome["verdict"]) == (0, 2, "PASS")


@pytest.mark.slow
def test_a_job_that_slurm_requeues_is_followed_until_its_next_end(directory: Path, cluster: SlurmLab) -> None:
    (directory / "site.yaml").write_text('directives: ["--requeue"]\n')
    command = started(directory, "--site", "site.yaml")
    urgent = preempt(cluster)
    (directory / "stop").touch()
    # It is pending again, and Slurm starts it 2 minutes after the requeue at the earliest.
    wait_until(lambda: command.out.count("pending") > 1, f"not pending again: {command.out}", 200)
    cluster.slurm("scancel", urgent)
    code, outcome = command.end()
    assert (code, outcome["verdict"], outcome["attempt"]) == (0, "PASS", 1), command.out
    assert command.out.count("running: n[1-2]") == 2


@pytest.mark.slow
def test_the_time_limit_of_slurm_is_no_fault_of_the_program(directory: Path) -> None:
    (directory / "site.yaml").write_text('partition: short\ntime_limit: "1"\n')
    code, outcome = started(directory, "--site", "site.yaml").end()
    assert (code, outcome["cause"]) == (125, "infra")
    assert "Slurm ended the job at its time limit" in outcome["summary"]


def test_a_job_that_cannot_start_shows_its_last_output(directory: Path) -> None:
    (directory / "site.yaml").write_text("agent: /no/such/nsa-harness\n")
    code, outcome = Command(directory, str(PROGRAM), *TWO_NODES, "--site", "site.yaml").end()
    assert (code, outcome["cause"]) == (125, "infra")
    assert outcome["detail"]["repeat"].endswith(f"spec.json --engine slurm --nodes 2 --site {directory}/site.yaml")
    assert "before nsa-harness started on its nodes" in outcome["summary"]
    assert "/no/such/nsa-harness" in outcome["summary"]


def test_a_job_that_can_never_start_says_why_and_is_cancelled_by_ctrl_c(directory: Path) -> None:
    (directory / "site.yaml").write_text('directives: ["--cpus-per-task=9"]\n')
    command = Command(directory, str(PROGRAM), *TWO_NODES, "--site", "site.yaml")
    command.wait_for("(PartitionConfig)")
    assert "so it never starts; Ctrl-C cancels it; change cpus_per_node" in " ".join(command.out.split())
    command.process.send_signal(signal.SIGINT)
    code, outcome = command.end()
    assert (code, outcome["cause"]) == (130, "interrupted")
    assert "was cancelled while it waited in the queue, because nsa-harness was interrupted" in outcome["summary"]
    assert "cancelling: nsa-harness was interrupted" in " ".join(command.out.split())
    assert "cancelled: nsa-harness cancelled it" in " ".join(command.out.split())
    assert "--resume=" in command.out
    again = subprocess.run([COMMAND[0], "report"], cwd=directory, capture_output=True, text=True, check=False)
    assert "was cancelled while it waited in the queue" in " ".join(again.stdout.split())


def test_what_slurm_refuses_is_an_error_before_anything_runs(directory: Path) -> None:
    (directory / "site.yaml").write_text("cpus_per_node: 9\npartition: mian\n")
    for words, text in (
        (["--nodes", "9"], "--nodes: 9 nodes, but --engine slurm has only 2"),
        (["--gpus-per-node", "5"], "--gpus-per-node: 5, but a node has at most 4"),
        (
            ["--partition", "mian"],
            '--partition: no partition "mian"; there are main, short, urgent; did you mean "main"?',
        ),
        (["--site", "site.yaml"], 'site.yaml:2:1: partition: no partition "mian"'),
        (["--site", "site.yaml", "--partition", "short"], "site.yaml:1:1: cpus_per_node: 9, but a node"),
        (["--nodes", "2", "--ranks", "3"], "--nodes: 3 ranks cannot be divided equally among 2 nodes"),
    ):
        result = subprocess.run(
            [*COMMAND, str(PROGRAM), "--engine", "slurm", *words, "--dry-run"], cwd=directory, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert (result.returncode, text in result.stderr) == (2, True), result.stderr


EARLY_STOP = """\
import torch
import torch.distributed as dist


def train(rank):
    bad = 0
    for step in range(20):
        dist.all_reduce(torch.ones(1))
        bad = bad + 1 if rank == 1 and step > 3 else 0
        if bad >= 3:
            break
    dist.barrier()


dist.init_process_group("gloo")
train(dist.get_rank())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_why_and_verify_submit_jobs_with_the_options_of_the_failed_job(directory: Path) -> None:
    (directory / "early.py").write_text(EARLY_STOP)
    code, _ = Command(directory, "early.py", "--ranks=2", "--engine=slurm", "--nodes=2", "limits.stall_s=10").end()
    assert code == 124
    latest = directory / "reports" / "latest"
    failed = latest.resolve()
    for command, file, text in (
        (["why", str(failed), "--budget", "1runs"], "early", "ANSWER  value that depends on the rank at early.py:"),
        (["run", "--verify", str(failed)], "early", "NOT FIXED"),
    ):
        result = subprocess.run(
            [COMMAND[0], *command], cwd=directory, capture_output=True, text=True, check=False, timeout=400
        )
        assert text in result.stdout, result.stdout + result.stderr
        script = (latest / file / "job.sbatch").read_text()
        assert latest.resolve() != failed
        assert "#SBATCH --nodes=2\n" in script
        assert sorted(path.name for path in (latest / file / "nodes").iterdir()) == ["n1", "n2"]
