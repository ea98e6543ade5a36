"""What the end of a job says about a run, when a job is repeated, and runs on engines that need no cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.commands.stored_job import JOB, StoredJob, is_open, read_job, refused, with_job_state, write_job
from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.plan import EngineChoice, Expect, Launcher, Limits, RunSpec
from nsa_harness.core.report import Artifact, MachineFacts, Outcome, Report, SpecSummary, Status, Verdict
from nsa_harness.core.schedule import Policy, is_interrupted, needs_another_attempt
from nsa_harness.engine.interface import OUTPUT, JobHandle, JobState, JobStatus
from nsa_harness.errors import StoredRunError
from nsa_harness.render.answer import advice
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.supervisor.storage.rundir import AttemptDir
from tools.slurm_lab import wait_until

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "cluster_job.py"
COMMAND = [str(Path(sys.executable).parent / "nsa-harness"), "run"]
SPEC = RunSpec(
    scenario="train", about="", ranks=4, launcher=Launcher.TORCHRUN, program=("train.py",), env=(), cwd=None,
    backend="gloo", device="cpu", subject="", limits=Limits(), expect=Expect(), fault=None, notes=(), not_covered=(),
    spec_hash="1",
)  # fmt: skip
_TOKEN = "sk-4f9d8a7b6c5e4d3f2a1b"
CHOICE = EngineChoice(name="slurm", nodes=2, options=("--engine", "slurm", "--nodes", "2", "--partition", "a b"))
HANDLE = JobHandle(engine="slurm", id="17", directory="/shared")


def judged(status: Status) -> Outcome:
    verdict = Verdict(status=status, kind=None, cause=None, summary="as the agents saw it")
    return Outcome(spec=SpecSummary(scenario="train", about=""), verdict=verdict, ending_text="", dir="train")


def ended(tmp_path: Path, job_status: JobStatus | None, agents: Status | None) -> Outcome:
    """Return the outcome of a job that ended with `job_status`, whose agents judge it as `agents`."""
    attempt = AttemptDir(tmp_path / "train", tmp_path)
    (attempt.path / ("nodes/n1" if agents else "")).mkdir(parents=True)
    (attempt.path / OUTPUT).write_text("slurmstepd: error: execve(): nsa-harness: No such file\n" * 2)
    job = StoredJob(handle=HANDLE, status=job_status, choice=CHOICE)
    return with_job_state(attempt, SPEC, 1, job, lambda: judged(agents or Status.ERROR))


def test_a_job_that_was_refused_is_explained_by_what_the_engine_said(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "train", tmp_path)
    outcome = refused(SPEC, attempt, 1, "sbatch: Invalid feature specification", CHOICE)
    assert (outcome.verdict.status, outcome.verdict.cause) == (Status.ERROR, "infra")
    assert outcome.verdict.summary == "the job could not be submitted: sbatch: Invalid feature specification"
    assert "Correct the option" in advice(outcome)
    assert outcome.ending_text == "nothing was started"
    assert (outcome.repeat_command or "").endswith("train/spec.json --engine slurm --nodes 2 --partition 'a b'")


def test_report_repeats_that_a_job_was_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "sinfo", "scontrol"):
        text = "echo 'n1|2|(null)|(null)'" if name == "sinfo" else "echo 'sbatch: error: no such feature' >&2; exit 1"
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    for command in (["run", "fails.py", "--engine=slurm"], ["report"]):
        result = subprocess.run(
            [COMMAND[0], *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert result.returncode == 125, result.stdout + result.stderr
        said = " ".join(result.stdout.split())
        assert "The job could not be submitted: sbatch: no such feature" in said
        assert "nothing was started" in said


def test_ranks_that_cannot_be_divided_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nlauncher: false {host}\n")
    words = [
        str(PROGRAM),
        "--ranks=3",
        "--engine=hosts",
        "--nodes=2",
        f"--site={site}",
        f"--out={tmp_path / 'reports'}",
    ]
    ran = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, "3 ranks cannot be divided equally among 2 nodes" in ran.stderr) == (2, True)
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("state", "agents", "verdict"),
    [
        (JobState.COMPLETED, Status.PASS, "PASS"),
        (JobState.FAILED, Status.FAIL, "FAIL"),
        (JobState.FAILED, Status.HANG, "HANG"),
        (JobState.LOST, Status.FAIL, "FAIL"),  # Slurm has forgotten the job, and its files are complete
        (JobState.NODE_FAIL, Status.FAIL, "ERROR"),  # the ranks failed because the node did
        (JobState.TIMEOUT, Status.FAIL, "ERROR"),
        (JobState.TIMEOUT, Status.HANG, "HANG"),  # proven before
        (JobState.CANCELLED, Status.PASS, "PASS"),  # all ranks had ended well
        (JobState.OUT_OF_MEMORY, Status.FAIL, "ERROR"),
        (JobState.PREEMPTED, Status.ERROR, "ERROR"),
        (JobState.REQUEUED, None, "ERROR"),
        (JobState.COMPLETED, None, "ERROR"),
        (JobState.LOST, None, "ERROR"),
    ],
)
def test_the_end_of_a_job_and_the_evidence_of_its_agents_decide_together(
    tmp_path: Path, state: JobState, agents: Status | None, verdict: str
) -> None:
    outcome = ended(tmp_path, JobStatus(state=state, reason="a reason", exit_code=1, nodes="n[1-2]"), agents)
    assert outcome.verdict.status == verdict
    if verdict == "ERROR":
        assert outcome.verdict.cause == "infra"
        assert outcome.verdict.summary.startswith("job 17 on n[1-2]: a reason")
        assert outcome.findings[0].proof == ("train/job.json",)
        assert outcome.trouble == ()
        assert advice(outcome)
    else:
        assert outcome == judged(agents or Status.ERROR)


def test_a_job_that_ended_before_its_agents_started_shows_its_last_output(tmp_path: Path) -> None:
    outcome = ended(tmp_path, JobStatus(state=JobState.FAILED, exit_code=2), None)
    assert outcome.verdict.summary == (
        "job 17: ended with exit code 2, before nsa-harness started on its nodes; its last output: slurmstepd: error:"
        " execve(): nsa-harness: No such file | slurmstepd: error: execve(): nsa-harness: No such file"
    )


def test_a_summary_names_output_only_if_the_job_printed_something(tmp_path: Path) -> None:
    failed = StoredJob(handle=HANDLE, status=JobStatus(state=JobState.FAILED, exit_code=1), choice=CHOICE)
    (tmp_path / "silent" / "train").mkdir(parents=True)
    attempt = AttemptDir(tmp_path / "silent" / "train", tmp_path / "silent")
    silent = with_job_state(attempt, SPEC, 1, failed, lambda: judged(Status.ERROR))
    told = ended(tmp_path, failed.status, None)
    assert (silent.ending_text, told.ending_text) == ("the job printed nothing", f"see train/{OUTPUT}")
    assert "Check the commands of `setup`" in advice(silent)
    assert advice(told).startswith("Read output.log")
    summary = summary_of(silent)
    assert OUTPUT not in summary.partition("### Repeat it")[0]
    assert "train/spec.json --engine slurm --nodes 2 --partition 'a b'\n```" in summary


def test_code_in_a_summary_is_not_escaped() -> None:
    summary = summary_of(judged(Status.ERROR))
    assert "No command repeats this run. `nsa-harness watch -- COMMAND` observes" in summary
    nodes = replace(judged(Status.HANG), artifacts=(Artifact(path="nodes/*/dumps/rank*.txt", count=2, absent=None),))
    assert "`nsa-harness watch --shared DIR -- COMMAND` on each node, with a new DIR" in summary_of(nodes)


def summary_of(outcome: Outcome) -> str:
    machine = MachineFacts(host="login", cpus=1, gpus=(), torch=None)
    report = Report(
        run_id="1", harness="1", machine=machine, command="watch", interrupted=False, outcomes=(outcome,), not_run=()
    )  # fmt: skip
    return summary_md(report, Playbook(hypotheses=()))


@pytest.mark.parametrize(("has_started", "where"), [(False, " while it waited in the queue"), (True, "")])
def test_a_job_that_nsa_harness_cancelled_is_run_again_by_resume(tmp_path: Path, has_started: bool, where: str) -> None:
    attempt = AttemptDir(tmp_path / "train", tmp_path)
    (attempt.path / "nodes" / "n1").mkdir(parents=True)
    job = StoredJob(handle=HANDLE, status=JobStatus(state=JobState.CANCELLED), cancelled=True, has_started=has_started)
    outcome = with_job_state(attempt, SPEC, 1, job, lambda: judged(Status.FAIL))
    assert outcome.verdict.summary == f"job 17 was cancelled{where}, because nsa-harness was interrupted"
    assert is_interrupted(outcome)
    in_time = replace(job, status=JobStatus(state=JobState.COMPLETED))
    assert with_job_state(attempt, SPEC, 1, in_time, lambda: judged(Status.PASS)) == judged(Status.PASS)


def test_a_job_whose_end_nobody_saw_is_not_judged(tmp_path: Path) -> None:
    outcome = ended(tmp_path, None, Status.PASS)
    assert (outcome.verdict.status, outcome.verdict.cause) == (Status.ERROR, "interrupted")
    assert "--resume" in outcome.verdict.summary


def test_only_what_the_cluster_did_is_repeated(tmp_path: Path) -> None:
    lost = ended(tmp_path, JobStatus(state=JobState.NODE_FAIL, reason="a node of the job failed"), None)
    policy = Policy(retries_infra=2)
    assert needs_another_attempt(policy, [lost])
    assert needs_another_attempt(policy, [lost, replace(lost, attempt=2)])
    assert not needs_another_attempt(policy, [lost, replace(lost, attempt=2), replace(lost, attempt=3)])
    assert not needs_another_attempt(policy, [judged(Status.FAIL)])
    assert not needs_another_attempt(policy, [lost, judged(Status.FAIL)])
    assert not needs_another_attempt(Policy(), [lost])


def test_a_stored_job_is_open_until_its_end_is_recorded(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path, tmp_path)
    assert not is_open(attempt)
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n")
    assert is_open(attempt)  # nsa-harness may have been killed after the submission
    write_job(attempt, StoredJob(handle=HANDLE))
    assert is_open(attempt)
    write_job(attempt, StoredJob(handle=HANDLE, status=JobStatus(state=JobState.COMPLETED)))
    assert not is_open(attempt)
    assert read_job(attempt) == StoredJob(handle=HANDLE, status=JobStatus(state=JobState.COMPLETED))
    (tmp_path / JOB).write_text("{")
    with pytest.raises(StoredRunError, match=r"job\.json: cannot be read"):
        read_job(attempt)


# Runs without a cluster.


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=directory, capture_output=True, text=True, check=False, timeout=280)


def test_dry_run_prints_the_script_and_launches_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, str(PROGRAM), "--engine", "local", "--ranks", "2", "run.env.A='b c'", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "export A='b c'" in result.stdout
    assert "nsa-harness watch --shared" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nodes", "2"], "--nodes belongs to a job; add --engine slurm"),
        (["--engine", "local", "--nodes", "2"], "--nodes: 2 nodes, but --engine local has only 1"),
        (["--engine", "hosts"], "--engine hosts: the site file names no host"),
        (["--engine", "local", "--partition", "a b"], "--partition: "),
        (["--engine", "local", "--site", "none.yaml"], "--site: none.yaml: No such file or directory"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(tmp_path: Path, words: list[str], text: str) -> None:
    result = run(tmp_path, str(PROGRAM), *words)
    assert (result.returncode, text in result.stderr) == (2, True), result.stderr


def test_two_hosts_share_the_ranks_of_a_job_and_report_once(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("hosts: {h1: 127.0.0.1, h2: 127.0.0.1}\nlauncher: env HOST_NAME={host}\n")
    result = run(tmp_path, str(PROGRAM), "--engine", "hosts", "--site", "site.yaml", "--nodes", "2", "--ranks", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    latest = tmp_path / "reports" / "latest"
    (outcome,) = json.loads((latest / "report.json").read_text())["outcomes"]
    assert (outcome["verdict"], outcome["exit_codes"]) == ("PASS", {"0": 0, "1": 0})
    assert len(list((latest / "cluster_job" / "nodes").iterdir())) == 2
    again = subprocess.run([COMMAND[0], "report"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout


def test_a_failed_job_is_verified_and_repeated_on_its_engine(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    first = run(tmp_path, "fails.py", "--ranks", "1", "--engine", "local")
    assert first.returncode == 1, first.stdout + first.stderr
    latest = tmp_path / "reports" / "latest"
    failed = latest.resolve()
    assert "spec.json --engine local\n" in (failed / "SUMMARY.md").read_text()
    plan = run(tmp_path, "--verify", str(failed), "--dry-run")
    assert "nsa-harness watch --shared" in plan.stdout
    assert plan.stdout.rstrip().endswith("fails.py")
    result = run(tmp_path, "--verify", str(failed))
    assert (result.returncode, "run 1 failed in" in result.stdout) == (1, True), result.stdout + result.stderr
    assert latest.resolve() != failed
    assert json.loads((latest / "fails" / "job.json").read_text())["handle"]["engine"] == "local"
    again = run(tmp_path, str(failed / "fails" / "spec.json"), "--engine", "local")
    assert again.returncode == 1, again.stdout + again.stderr


def test_both_sides_of_a_claim_run_as_jobs(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nraise SystemExit(int(sys.argv[1]))\n")
    words = ["claim", "ends.py", "--ranks", "1", "--engine", "local", "--arg=3,0", "--pairs", "1"]
    result = subprocess.run(
        [COMMAND[0], *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert result.returncode == 125, result.stdout + result.stderr  # one pair decides nothing
    jobs = sorted((tmp_path / "reports" / "latest").glob("*/job.json"))
    states = sorted(json.loads(job.read_text())["status"]["state"] for job in jobs)
    assert states == ["completed", "failed"], result.stdout
    refused = subprocess.run([COMMAND[0], *words, "--nodes", "2"], cwd=tmp_path, capture_output=True, check=False)
    assert refused.returncode == 2


def test_a_job_that_agents_observed_is_not_launched_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "fails.py"]
    watch = [COMMAND[0], "watch", "--shared", str(tmp_path / "job"), "--nodes=1", "--", *torchrun]
    subprocess.run(watch, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    summary = (tmp_path / "job" / "SUMMARY.md").read_text()
    assert "`nsa-harness watch --shared DIR -- COMMAND` on each node" in summary
    assert "nsa-harness run " not in summary
    result = run(tmp_path, "--verify", "job")
    assert (result.returncode, "agents on the nodes observed this job" in result.stderr) == (2, True), result.stderr


def test_a_job_in_the_background_outlives_the_command_and_is_followed_again(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, str(PROGRAM), "--engine", "local", "--ranks", "2", f"run.env.API_TOKEN={_TOKEN}", "--", "endless"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as command:  # fmt: skip
        output = tmp_path / "reports" / "latest" / "cluster_job" / OUTPUT
        wait_until(lambda: output.exists() and output.read_text().count("trained") == 2, "no training", 200)
        os.kill(command.pid, signal.SIGKILL)
    (tmp_path / "stop").touch()
    result = run(tmp_path, "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASS" in result.stdout
    script = output.with_name("job.sh").read_text()
    assert "export API_TOKEN=" in script
    assert _TOKEN not in script
