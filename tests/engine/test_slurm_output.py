"""The parsers of what Slurm prints: recorded outputs of Slurm 22.05, every state, arrays, and text without sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.engine.interface import JobState
from nsa_harness.engine.slurm_facts import (
    NodeFacts,
    Partition,
    feature_names,
    parse_gpus,
    parse_nodes,
    parse_partitions,
    parse_time_limit,
)
from nsa_harness.engine.slurm_output import parse_job_id, parse_sacct, parse_show_job
from nsa_harness.engine.slurm_reasons import reason_text

HERE = Path(__file__).parent
JOBS = (HERE / "show_job.txt").read_text()  # scontrol show job -o, of a real cluster
ARRAY = (HERE / "show_array.txt").read_text()  # of job 5: tasks 0 and 1 run, 2 and 3 wait
COMPLETED = next(line for line in JOBS.splitlines() if "JobState=COMPLETED" in line)


@pytest.mark.parametrize(
    ("job", "state", "exit_code", "nodes", "reason"),
    [
        ("1", JobState.COMPLETED, 0, "n1", ""),
        ("2", JobState.FAILED, 7, "n1", ""),
        ("6", JobState.PENDING, None, "", "it is held; `scontrol release` lets it start (JobHeldUser)"),
        ("7", JobState.PENDING, None, "", "jobs with a higher priority are before it in the queue (Priority)"),
        ("12", JobState.NODE_FAIL, -15, "n[1-2]", "a node of the job failed"),
    ],
)
def test_recorded_jobs(job: str, state: JobState, exit_code: int | None, nodes: str, reason: str) -> None:
    status = parse_show_job(JOBS, job)
    assert status is not None
    assert (status.state, status.exit_code, status.nodes, status.reason) == (state, exit_code, nodes, reason)


def test_a_job_that_is_cancelled_in_the_queue() -> None:
    (line,) = [line for line in JOBS.splitlines() if "JobState=CANCELLED" in line]
    status = parse_show_job(line, "4")
    assert status is not None
    assert (status.state, status.reason) == (JobState.CANCELLED, "somebody cancelled the job")


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", JobState.PENDING), ("CONFIGURING", JobState.PENDING), ("RUNNING", JobState.RUNNING),
        ("COMPLETING", JobState.RUNNING), ("SUSPENDED", JobState.RUNNING), ("TIMEOUT", JobState.TIMEOUT),
        ("DEADLINE", JobState.TIMEOUT), ("PREEMPTED", JobState.PREEMPTED), ("BOOT_FAIL", JobState.NODE_FAIL),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY), ("REVOKED", JobState.CANCELLED), ("REQUEUED", JobState.REQUEUED),
        ("REQUEUE_HOLD", JobState.REQUEUED), ("SPECIAL_EXIT", JobState.REQUEUED), ("NODE_FAIL", JobState.NODE_FAIL),
    ],
)  # fmt: skip
def test_every_state_of_slurm(word: str, state: JobState) -> None:
    shown = parse_show_job(COMPLETED.replace("JobState=COMPLETED", f"JobState={word}"), "1")
    accounted = parse_sacct(f"1|{word}|0:0|n1\n", "1")
    assert shown is not None
    assert accounted is not None
    assert shown.state is accounted.state is state
    assert state.is_abnormal is (state not in (JobState.PENDING, JobState.RUNNING))


def test_an_array_runs_while_one_of_its_tasks_runs() -> None:
    states = {
        job: status and status.state for job in ("5", "5_0", "5_3", "5_9") if [status := parse_show_job(ARRAY, job)]
    }
    assert states == {"5": JobState.RUNNING, "5_0": JobState.RUNNING, "5_3": JobState.PENDING, "5_9": None}
    waiting = parse_show_job(ARRAY, "5_2")
    assert waiting is not None
    assert waiting.reason.startswith("as many tasks of its array are running as its throttle allows")


def test_the_worst_task_decides_the_end_of_an_array() -> None:
    lines = "5_0|COMPLETED|0:0|n1\n5_1|FAILED|3:0|n2\n5_2|TIMEOUT|0:15|n2\n"
    status = parse_sacct(lines, "5")
    assert status is not None
    assert (status.state, status.nodes) == (JobState.TIMEOUT, "n1,n2")


def test_a_requeued_job_has_the_state_of_its_last_line() -> None:
    status = parse_sacct("7|NODE_FAIL|0:0|n1\n7|CANCELLED by 1000|0:15|n2\n", "7")
    assert status is not None
    assert (status.state, status.exit_code, status.nodes) == (JobState.CANCELLED, -15, "n2")


def test_a_name_that_looks_like_a_state_is_no_state() -> None:
    line = COMPLETED.replace("JobName=wrap", "JobName=x-JobState=FAILED")
    status = parse_show_job(line, "1")
    assert status is not None
    assert status.state is JobState.COMPLETED


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: Invalid job id specified", "JobId=1", "||||", "1|"])
def test_text_without_a_state_is_no_job(text: str) -> None:
    assert parse_show_job(text, "1") is None
    assert parse_sacct(text, "1") is None
    assert parse_job_id(text) is None


@given(st.text())
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    parse_show_job(text, "1")
    parse_sacct(text, "1_2")
    parse_gpus(text)
    parse_job_id(text)
    reason_text(text)
    parse_partitions(text)
    parse_nodes(text)
    feature_names(text)


def test_the_id_of_a_submitted_job() -> None:
    assert parse_job_id("17\n") == "17"
    assert parse_job_id("17;cluster\n") == "17"
    assert parse_job_id("sbatch: note of the site\n18\n") == "18"
    assert parse_job_id("5_[0-3%2]\n") is None


def test_the_gpus_of_the_nodes() -> None:
    assert parse_gpus("n1 gpu:4\nn2 gpu:a100:8(S:0-1),nvme:2\n") == 8
    assert parse_gpus("n1 (null)\n") is None


def test_reasons_in_words() -> None:
    assert reason_text("Resources") == "it waits for free nodes (Resources)"
    assert reason_text("ReqNodeNotAvail,_UnavailableNodes:n[2-3]").startswith(
        "nodes that it needs are down, drained or reserved: n[2-3] (ReqNodeNotAvail)"
    )
    assert reason_text("None") == ""
    assert reason_text("SomethingNew_in_2030") == "SomethingNew in 2030"


@pytest.mark.parametrize(
    ("reason", "meaning", "setting"),
    [
        ("PartitionConfig", "it asks for more on each node than", "cpus_per_node"),
        ("PartitionNodeLimit", "it asks for more nodes", "--nodes"),
        ("PartitionTimeLimit", "it asks for more time", "time_limit"),
        ("BadConstraints", "no node has what it asks for", "--constraint"),
        ("QOSMaxGRESPerJob", "it asks for more GPUs than its QOS allows in a job", "--gpus-per-node"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more time than its QOS allows in a job", "time_limit"),
        ("AssocMaxCpuPerNode", "it asks for more cores than its account allows on each node", "cpus_per_node"),
        ("QOSMinGRES", "it asks for fewer GPUs than its QOS requires", "--gpus-per-node"),
        ("InvalidAccount", "its account does not exist", "--account"),
    ],
)
def test_a_job_that_can_never_start_says_so_and_which_setting_to_change(
    reason: str, meaning: str, setting: str
) -> None:
    text = reason_text(reason)
    assert meaning in text
    assert "so it never starts; Ctrl-C cancels it" in text
    assert setting in text
    assert reason in text


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("QOSMaxJobsPerUserLimit", "the limit of running jobs of its QOS is reached"),
        ("AssocMaxJobsLimit", "the limit of running jobs of its account is reached"),
        ("AssocGrpSubmitJobsLimit", "the limit of submitted jobs of its account is reached"),
        ("QOSMaxGRESPerUser", "with it, the GPUs of a user would exceed the limit of its QOS"),
        ("AssocGrpCpuLimit", "with it, the cores of all jobs together would exceed the limit of its account"),
        ("AssocGrpCPUMinutesLimit", "the budget of cores x time of its account is used up"),
    ],
)
def test_a_job_that_waits_for_a_limit_says_whose_limit_it_is(reason: str, meaning: str) -> None:
    assert reason_text(reason).startswith(meaning)
    assert "never starts" not in reason_text(reason)


def test_the_partitions_and_nodes_of_a_cluster() -> None:
    short, long = parse_partitions(
        "PartitionName=short Default=YES MaxNodes=4 MaxTime=00:01:00 State=UP\n"
        "PartitionName=long Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP\n"
    )
    assert short == Partition(name="short", max_time_s=60.0, max_nodes=4, is_default=True)
    assert long == Partition(name="long", max_time_s=None, max_nodes=None, is_default=False)
    assert parse_nodes("n1|64|gpu:a100:8(S:0-1)|a100,ib\nn1|64|gpu:a100:8|a100,ib\nn2|2|(null)|(null)\nnoise\n") == (
        NodeFacts(name="n1", cpus=64, gpus=8, features=("a100", "ib")),
        NodeFacts(name="n2", cpus=2, gpus=0, features=()),
    )
    assert feature_names("[a100*2&ib]|h100") == ("a100", "ib", "h100")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("04:00:00", 14400), ("2-12", 216000), ("1-1:30", 91800), ("UNLIMITED", None)],
)
def test_time_limits_of_slurm(text: str, seconds: float | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["04:00 00", "4h", "1:2:3:4", "-", "1-"])
def test_text_that_is_no_time_limit(text: str) -> None:
    with pytest.raises(ValueError, match="no time limit"):
        parse_time_limit(text)
