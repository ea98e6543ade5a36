"""What a job leaves that nobody watched: each format recognised by its content, put together by rank, and judged.

The texts are torch's own: torchrun's, gloo's and py-spy's as torch 2.13 on a CPU prints them; those of NCCL's watchdog
as ProcessGroupNCCL.cpp of torch 2.2 to 2.13 words them and public issue threads quote them.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from builders import Diagnosis, diagnose
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.evidence.job_files import (
    JobFile,
    JobFileKind,
    by_rank,
    exits_of_tasks,
    is_document,
    rank_of_path,
    read_job_file,
    timeouts,
)
from nsa_harness.core.evidence.post_mortem import PostMortem, read_post_mortem
from nsa_harness.core.outcome.outcome import rank_statuses
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import Judgement, judge

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LOGGER = "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py"


def left(**files: str | bytes) -> PostMortem:
    """Of files by name; "__" stands for a slash."""
    return read_post_mortem([named(name.replace("__", "/"), data) for name, data in files.items()], "node")


def named(name: str, data: str | bytes) -> JobFile:
    return read_job_file(name, data.encode() if isinstance(data, str) else data)


def judged(after: PostMortem) -> tuple[Judgement, Diagnosis]:
    judgement = judge(after.evidence)
    return judgement, diagnose(after.evidence, judgement)


def answer(after: PostMortem) -> tuple[Status, str | None, tuple[int, ...], int | None]:
    """Verdict, cause, ranks and line; never certain, whatever was read."""
    judgement, diagnosis = judged(after)
    if judgement.status is not Status.ERROR:
        assert diagnosis.findings[0].confidence < CERTAIN
    culprit = diagnosis.culprit
    line = culprit.place.line if culprit and culprit.place else None
    return judgement.status, diagnosis.cause, culprit.ranks if culprit else (), line


def traceback(line: int, error: str, call: str = "", prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", f'  File "/home/ada/train.py", line {line}, in step']
    if call:
        lines += [
            f'  File "{LOGGER}", line 83, in wrapper',
            f'  File "{C10D}", line 3252, in {call}',
            "    work.wait()",
        ]
    return "".join(f"{prefix}{one}\n" for one in [*lines, error])


GLOO = "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp"
TIMED_OUT = f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
PEER_GONE = (
    f"{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:16261. This is typically caused by a remote worker"
)


def summary(first: tuple[int, int, int], *others: tuple[int, int, int], script: str = "train.py") -> str:
    """torchrun's table of (rank, exit code, process)."""

    def row(number: int, rank: int, code: int, pid: int) -> str:
        return (
            f"[{number}]:\n  time      : 2026-11-23_02:07:32\n  host      : node7\n"
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"
            "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs\n"
        )

    rule, line = "=" * 60, "-" * 60
    failures = "".join(row(number, *one) for number, one in enumerate(others, start=1))
    return (
        "Traceback (most recent call last):\n"
        '  File "/env/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{rule}\n{script} FAILED\n{line}\nFailures:\n{failures}{line}\n"
        f"Root Cause (first observed failure):\n{row(0, *first)}{rule}\n"
    )


# Logs.


def test_the_rank_that_raised_of_itself_explains_those_that_lost_it() -> None:
    after = left(
        logs__attempt_0__0__stderr_log=traceback(19, PEER_GONE, "all_reduce", "[rank0]: "),
        logs__attempt_0__1__stderr_log=traceback(22, "ValueError: bad batch", prefix="[rank1]: "),
        torchrun_txt=summary((1, 1, 71), (0, -15, 70)),
    )
    assert answer(after) == (Status.FAIL, "exception", (1,), 22)
    assert after.script == "train.py"
    assert {one.rank: one.exit.status for one in after.evidence.ranks if one.exit} == {0: -15, 1: 1}


def test_lines_of_several_ranks_in_one_file_are_told_apart_by_what_stands_before_them() -> None:
    zero = traceback(19, PEER_GONE, "all_reduce", "[default0]:[rank2]: ").splitlines()
    one = traceback(22, "ValueError: bad batch", prefix="[default1]:[rank3]: ").splitlines()
    mixed = [line for pair in zip(zero, [*one, *[""] * len(zero)], strict=False) for line in pair]
    log = by_rank("\n".join(["[default1]:loss 0.3", *mixed]))
    assert log.local == {0: 2, 1: 3}
    assert log.lines[3][1].startswith("Traceback")
    assert answer(left(job_txt="\n".join(mixed))) == (Status.FAIL, "exception", (3,), 22)


def test_a_local_rank_is_the_rank_that_another_line_says_it_is() -> None:
    lines = by_rank("[default1]:[rank3]: Traceback\n[default1]:loss 0.3\n[default0]:ready\n").lines
    assert lines[3] == ("Traceback", "loss 0.3")
    assert lines[0] == ("ready",)


def test_labels_of_srun_are_the_ranks_and_a_time_in_a_line_is_none() -> None:
    zero, one = traceback(19, PEER_GONE, prefix="0: "), traceback(22, "ValueError: bad batch", prefix="1: ")
    after = left(slurm_4711_out=f"{one}{zero}srun: error: node7: task 1: Exited with exit code 1\n")
    assert answer(after) == (Status.FAIL, "exception", (1,), 22)
    assert list(by_rank("12: started\nall is well\nno more\n").lines) == [None]


def test_what_srun_labels_may_be_torchrun_itself() -> None:
    labelled = "".join(f"0: {line}\n" for line in summary((9, -9, 71), (8, -15, 70)).splitlines())
    assert answer(left(slurm_out=labelled))[:3] == (Status.FAIL, "killed", (9,))


def test_a_traceback_among_torchruns_own_words_is_of_the_rank_that_failed_first() -> None:
    """Older torch gives a rank's traceback no prefix."""
    after = left(job_txt=f"{traceback(22, 'ValueError: bad batch')}{summary((1, 1, 71), (0, -15, 70))}")
    assert answer(after) == (Status.FAIL, "exception", (1,), 22)
    assert [one.what for one in after.evidence.trouble] == ["job_txt"]


def test_a_decorated_main_is_no_launcher() -> None:
    """torchrun's @record stands in the traceback of the rank itself."""
    errors = "/env/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py"
    said = traceback(22, "ValueError: bad batch").replace("\n", f'\n  File "{errors}", line 367, in wrapper\n', 1)
    assert answer(left(rank3_log=said)) == (Status.FAIL, "exception", (3,), 22)


def test_slurm_says_who_ended_a_task_and_why() -> None:
    text = "srun: error: node7: tasks 0-1,3: Exited with exit code 1\nsrun: error: node7: task 2: Out Of Memory\n"
    assert exits_of_tasks(text) == ((0, 1), (1, 1), (3, 1), (2, -9))
    memory = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.\n"
    )
    after = left(out=f"{memory}srun: error: node7: task 1: Out Of Memory\nsrun: error: node7: task 0: Terminated\n")
    assert answer(after)[:3] == (Status.FAIL, "host_oom", (1,))


def test_a_rank_that_was_killed_has_no_sender_that_a_file_names() -> None:
    after = left(torchrun_txt=summary((1, -9, 71), (0, -15, 70)))
    judgement, diagnosis = judged(after)
    assert (judgement.status, diagnosis.cause, diagnosis.culprit and diagnosis.culprit.ranks) == (
        Status.FAIL,
        "killed",
        (1,),
    )
    facts = diagnosis.findings[0].facts
    assert (facts["killed_rank"], facts["signal"], facts["sender"]) == (1, "SIGKILL", "")
    assert facts["last_seen"] == {"unseen": "no_file"}


LIMIT = "slurmstepd: error: *** STEP 4711.0 ON node7 CANCELLED AT 2026-11-23T02:00:00 DUE TO TIME LIMIT ***\n"


def test_a_time_limit_ends_a_job_and_is_no_hang_without_more() -> None:
    judgement, diagnosis = judged(left(out=f"step 3 loss 0.1\n{LIMIT}"))
    assert (judgement.status, diagnosis.cause) == (Status.FAIL, "killed")
    assert "Slurm (time limit)" in diagnosis.findings[0].claim
    stacks = {
        f"rank{rank}_txt": thread(call, line) for rank, (call, line) in enumerate([("barrier", 7), ("all_reduce", 9)])
    }
    assert answer(left(out=LIMIT, **stacks))[0] is Status.HANG


AGENT = "/env/torch/distributed/elastic/multiprocessing/api.py"
STEPS = "[rank0]: step 6 loss 0.2\n[rank1]: step 6 loss 0.1\n[rank0]: step 7 loss 0.1\n"


def signalled(number: int) -> str:
    """What torchrun prints when a signal ends it."""
    error = f"torch.distributed.elastic.multiprocessing.api.SignalException: Process 71 got signal: {number}"
    return traceback(86, error).replace("\n", f'\n  File "{AGENT}", line 86, in _terminate_process_handler\n', 1)


@pytest.mark.parametrize(
    ("text", "signal", "claim"),
    [
        (signalled(15), "SIGTERM", "torchrun received SIGTERM"),
        (signalled(1), "SIGHUP", "torchrun received SIGHUP"),
        (LIMIT, "SIGTERM", "Slurm (time limit) ended it"),
        (LIMIT.replace(" DUE TO TIME LIMIT", ""), "SIGTERM", "as after scancel"),
    ],
)
def test_a_cancelled_job_is_called_so_with_the_last_line_of_each_rank(text: str, signal: str, claim: str) -> None:
    after = left(job_txt=f"{STEPS}{text}")
    judgement, diagnosis = judged(after)
    assert (judgement.status, diagnosis.cause, diagnosis.culprit and diagnosis.culprit.ranks) == (
        Status.FAIL, "killed", (),
    )  # fmt: skip
    facts = diagnosis.findings[0].facts
    assert (facts["signal"], facts["cancelled"], facts["killed_rank"]) == (signal, True, None)
    assert claim in diagnosis.findings[0].claim
    assert diagnosis.findings[0].claim.startswith("the job was cancelled from outside")
    seen = {row.rank: row.blocked_in for row in rank_statuses(after.evidence, judgement, diagnosis.culprit)}
    assert seen == {0: "last line: step 7 loss 0.1", 1: "last line: step 6 loss 0.1"}


def test_a_job_that_failed_before_it_was_cancelled_failed_on_its_own() -> None:
    raised = traceback(22, "ValueError: bad batch", prefix="[rank1]: ")
    for cancelled in (signalled(15), signalled(1), LIMIT):
        assert answer(left(job_txt=f"{STEPS}{raised}{cancelled}")) == (Status.FAIL, "exception", (1,), 22)


def test_a_hang_that_was_cancelled_is_a_hang() -> None:
    stacks = {
        f"rank{rank}_txt": thread(call, line) for rank, (call, line) in enumerate([("barrier", 7), ("all_reduce", 9)])
    }
    for cancelled in (signalled(15), signalled(1)):
        assert answer(left(job_txt=cancelled, **stacks))[0] is Status.HANG


def test_slurm_that_ends_a_step_after_a_failed_task_cancels_nothing() -> None:
    text = LIMIT.replace("TIME LIMIT", "TASK FAILURE")
    ended = "srun: error: node7: tasks 0-1: Terminated\n"
    facts = judged(left(out=f"step 3\n{text}{ended}"))[1].findings[0].facts
    assert (facts["cancelled"], facts["sender"]) == (False, "Slurm (task failure)")


def test_of_several_attempts_the_last_one_counts() -> None:
    after = left(
        logs__attempt_0__0__stderr_log=traceback(5, "ValueError: first"),
        logs__attempt_1__0__stderr_log="ready\n",
        logs__attempt_1__1__stderr_log=traceback(6, "KeyError: second"),
    )
    assert answer(after) == (Status.FAIL, "exception", (1,), 6)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("logs/x/attempt_0/3/stderr.log", (None, 3, None)),
        ("logs/rank3.log", (3, None, None)),
        ("run_7/nccl_trace_rank_3", (3, None, 3)),
        ("job_3.out", (None, None, 3)),
        ("train.log", (None, None, None)),
    ],
)
def test_a_path_says_of_which_rank_a_file_is(name: str, told: tuple[int | None, int | None, int | None]) -> None:
    path = rank_of_path(name)
    assert (path.rank, path.local, path.number if path.rank is None or path.number else None) == told


def test_a_log_without_a_rank_is_one_of_the_ranks_and_that_is_said() -> None:
    after = left(rank0_log="ready\n", other_log=traceback(22, "ValueError: bad batch"))
    assert answer(after) == (Status.FAIL, "exception", (1,), 22)
    assert [one.what for one in after.evidence.trouble] == ["other_log"]


# Collectives that were waited for in vain.


def watchdog(rank: int, seq: int, op: str = "ALLREDUCE", group: str = "0") -> str:
    return (
        f"[rank{rank}]:[E1123 02:07:08.408271257 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective"
        f" operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for"
        f" 600013 milliseconds before timing out.\n{behind(rank, seq + 2, seq - 1, seq, group)}"
    )


def behind(rank: int, enqueued: int, completed: int, at: int, group: str = "0") -> str:
    return (
        f"[rank{rank}]:[E1123 02:07:08.408271257 ProcessGroupNCCL.cpp:2252] [PG ID 0 PG GUID {group}(default_pg) Rank"
        f" {rank}]  failure detected by watchdog at work sequence id: {at} PG status: last enqueued work: {enqueued},"
        f" last completed work: {completed}\n"
    )


ABORTED = summary((0, -6, 70), (2, -6, 72), (1, -15, 71))


def test_a_timeout_of_the_watchdog_is_a_hang_and_the_rank_that_never_came_is_blamed() -> None:
    after = left(job_txt=watchdog(0, 13) + watchdog(2, 13) + behind(1, 12, 12, 12) + ABORTED)
    judgement, diagnosis = judged(after)
    assert answer(after)[:3] == (Status.HANG, "rank_absent", (1,))
    assert judgement.proof is not None
    assert judgement.proof.reason == "ranks 0, 2 gave up waiting for the others"
    facts = diagnosis.findings[0].facts
    assert (facts["blocked_in"], facts["waiting"]) == ("all_reduce #13", [0, 2])
    assert (facts["gave_up"], facts["may_have_waited_too"]) == ("Watchdog caught collective operation timeout", False)


def test_of_a_rank_without_a_word_it_is_not_said_that_it_never_came() -> None:
    _, diagnosis = judged(left(job_txt=watchdog(0, 13) + watchdog(1, 13) + "WORLD_SIZE=3\n"))
    (finding,) = diagnosis.findings
    assert (finding.code, finding.ranks) == ("rank_absent", (2,))
    assert (finding.facts["waiting"], finding.facts["blocked_in"]) == ([0, 1], "all_reduce #13")
    assert finding.facts["may_have_waited_too"]
    assert finding.left_open == ("these ranks may have been waiting there too, in a call that did not finish",)


@pytest.mark.parametrize(
    "files",
    [
        {"job_txt": watchdog(0, 13) + watchdog(1, 13)},
        {f"rank{rank}_log": traceback(19, TIMED_OUT, "all_reduce") for rank in (0, 1)},
    ],
)
def test_ranks_that_all_gave_up_in_one_call_blame_none_of_them(files: dict[str, str]) -> None:
    assert answer(left(**files))[:3] == (Status.HANG, "transport", ())


def test_ranks_that_gave_up_in_different_collectives_are_told_with_both() -> None:
    after = left(job_txt=watchdog(0, 13) + watchdog(1, 13, "BROADCAST") + watchdog(2, 13))
    assert answer(after)[:3] == (Status.HANG, "collective_order_mismatch", (1,))


def test_a_rank_that_entered_what_the_others_gave_up_is_not_the_one_that_is_missing() -> None:
    after = left(job_txt=watchdog(0, 13) + behind(1, 14, 12, 13))
    (look,) = after.evidence.snapshots
    assert [(one.rank, one.collectives[0].seq, one.collectives[0].retired) for one in look.ranks] == [
        (0, 13, False),
        (1, 13, False),
    ]


def test_the_group_of_a_timeout_is_that_of_the_progress_that_goes_with_it() -> None:
    ((rank, collective),) = timeouts(watchdog(3, 13, "_REDUCE_SCATTER_BASE", "7"))
    assert (rank, collective.group, collective.seq, collective.op) == (3, "7", 13, "_reduce_scatter_base")
    old = "[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96120,"
    ((rank, collective),) = timeouts(f"{old} OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 milliseconds")
    assert (rank, collective.group, collective.seq, collective.sizes) == (0, "0", 96120, ())


def test_a_failure_of_its_own_goes_before_those_who_gave_up_waiting_for_it() -> None:
    after = left(job_txt=watchdog(0, 13), rank1_log=traceback(22, "ValueError: bad batch"))
    assert answer(after) == (Status.FAIL, "exception", (1,), 22)


def test_who_gave_up_stood_where_its_traceback_says() -> None:
    """gloo raises in the call; the traceback is the stack of that moment."""
    after = left(
        logs__attempt_0__0__stderr_log=traceback(19, TIMED_OUT, "all_reduce", "[rank0]: "),
        logs__attempt_0__1__stderr_log=traceback(25, TIMED_OUT, "barrier", "[rank1]: "),
    )
    assert answer(after) == (Status.HANG, "collective_order_mismatch", (0, 1), 19)


def test_the_rank_that_a_monitored_barrier_misses_is_blamed() -> None:
    missed = "RuntimeError: Rank 1 failed to pass monitoredBarrier in 5000 ms"
    others = (
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv"
        " from rank 0. Please check rank 0 logs for faulty rank."
    )
    after = left(
        rank0_log=traceback(19, missed, "monitored_barrier"), rank2_log=traceback(19, others, "monitored_barrier")
    )
    assert answer(after)[:3] == (Status.HANG, "rank_absent", (1,))


def test_what_detail_found_unlike_is_told_of_both_sides() -> None:
    print_ = "CollectiveFingerPrint(SequenceNumber=14, OpType=ALLREDUCE, TensorShape=[{}], TensorDtypes=Float)"
    shape = (
        f"RuntimeError: Detected mismatch between collectives on ranks. Rank {{}} is running collective: {print_}, but"
        f" Rank {{}} is running collective: {print_}."
    )
    after = left(
        rank0_log=traceback(19, shape.format(0, 1000, 1, 1004), "all_reduce"),
        rank1_log=traceback(23, shape.format(1, 1004, 0, 1000), "all_reduce"),
    )
    assert answer(after)[:3] == (Status.FAIL, "shape_mismatch", (0, 1))


def test_ddp_that_missed_gradients_keeps_its_cause() -> None:
    said = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error"
        " indicates that your module has parameters that were not used in producing loss."
    )
    both = {f"rank{rank}_log": traceback(19, said) for rank in (0, 1)}
    assert answer(left(**both))[:2] == (Status.FAIL, "unused_params")


# Dumps.


def thread(call: str, line: int) -> str:
    return (
        "Thread 0x00007f8f94a266c0 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 982 in run\n\n'
        "Current thread 0x00007f8fb5a45b80 (most recent call first):\n"
        f'  File "{C10D}", line 5356 in {call}\n  File "{LOGGER}", line 83 in wrapper\n'
        f'  File "/home/ada/train.py", line {line} in step\n'
    )


def py_spy(call: str, line: int, pid: int = 71) -> str:
    return (
        f"Process {pid}: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        f'Thread {pid} (idle): "MainThread"\n    {call} (torch/distributed/distributed_c10d.py:5356)\n'
        f"    wrapper (torch/distributed/c10d_logger.py:83)\n    step (train.py:{line})\n"
    )


def py_spy_json(call: str, line: int, pid: int = 71) -> str:
    frames = [(call, C10D, 5356), ("wrapper", LOGGER, 83), ("step", "/home/ada/train.py", line)]
    stack = [{"name": name, "filename": file, "line": at} for name, file, at in frames]
    return json.dumps(
        [{"pid": pid, "thread_name": "MainThread", "os_thread_id": pid, "active": False, "frames": stack}]
    )


def pystack(call: str, line: int) -> str:
    return (
        "Traceback for thread 71 (python) [] (most recent call last):\n"
        f'    (Python) File "/home/ada/train.py", line {line}, in step\n'
        f'    (Python) File "{LOGGER}", line 83, in wrapper\n    (Python) File "{C10D}", line 5356, in {call}\n'
    )


@pytest.mark.parametrize("dump", [thread, py_spy, py_spy_json, pystack])
def test_dumps_of_all_ranks_in_different_calls_are_a_hang(dump: Any) -> None:
    after = left(rank0_txt=dump("barrier", 7), rank1_txt=dump("all_reduce", 9))
    assert {named("x", dump("barrier", 7)).kind} == {JobFileKind.STACKS}
    assert answer(after) == (Status.HANG, "collective_order_mismatch", (0, 1), 7)
    assert judged(after)[1].findings[0].left_open[-1] == (
        "the job was making progress, and the dumps of its ranks are from different moments"
    )


@pytest.mark.parametrize("dump", [thread, py_spy, py_spy_json, pystack])
def test_dumps_of_all_ranks_in_one_call_are_no_hang(dump: Any) -> None:
    assert answer(left(rank0_txt=dump("barrier", 7), rank1_txt=dump("barrier", 7)))[:2] == (
        Status.ERROR,
        "inconclusive",
    )


def test_a_dump_of_some_ranks_alone_proves_nothing() -> None:
    after = left(rank0_txt=py_spy("barrier", 7), rank1_txt=py_spy("all_reduce", 9), rank2_log="WORLD_SIZE=3\n")
    judgement, diagnosis = judged(after)
    assert (judgement.status, diagnosis.cause) == (Status.ERROR, "inconclusive")
    assert judgement.error == (
        "what was read shows neither a failure nor that it cannot go on: rank 0 is blocked in barrier; rank 1 is"
        " blocked in all_reduce"
    )


def test_a_dump_is_of_the_rank_whose_process_torchrun_names() -> None:
    after = left(
        a_txt=py_spy("barrier", 7, pid=72),
        b_txt=py_spy("all_reduce", 9, pid=71),
        torchrun_txt=summary((1, -15, 72), (0, -15, 71)),
    )
    assert [one.stacks[0].frames[0].function for one in after.evidence.snapshots[0].ranks] == ["all_reduce", "barrier"]


def test_a_short_name_is_the_file_that_something_else_names_in_full() -> None:
    after = left(rank0_txt=py_spy("barrier", 7), rank1_txt=thread("all_reduce", 9))
    (look,) = after.evidence.snapshots
    assert look.ranks[0].stacks[0].frames[-1].file == "/home/ada/train.py"


def entry(seq: int, op: str, line: int, *, retired: bool) -> dict[str, Any]:
    """As torch 2.13 records it; gloo leaves the state as it is."""
    frames = [(op, C10D, 3245), ("wrapper", LOGGER, 83), ("step", "/home/ada/train.py", line)]
    return {
        "frames": [{"name": name, "filename": file, "line": at} for name, file, at in frames],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": f"gloo:{op}",
        "time_created_ns": 1795399938732212311 + seq,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": retired,
        "is_p2p": False,
    }


def recorder(*entries: dict[str, Any]) -> bytes:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return pickle.dumps({"version": "2.10", "pg_config": groups, "entries": list(entries)}, protocol=2)


def routine(*lines: tuple[str, int]) -> bytes:
    last = len(lines)
    return recorder(
        *(entry(seq, op, line, retired=seq < last) for seq, (op, line) in enumerate(lines, start=1)),
    )


def test_recorders_tell_where_the_ranks_parted_and_not_where_they_stand() -> None:
    """Rank 0 made a call of its own before: it pairs with the next one of rank 1."""
    after = left(
        nccl_trace_rank_0=routine(*[("all_reduce", 19)] * 4, ("all_reduce", 15), ("all_reduce", 19)),
        nccl_trace_rank_1=routine(*[("all_reduce", 19)] * 5, ("barrier", 25)),
    )
    assert answer(after) == (Status.HANG, "collective_order_mismatch", (0,), 19)
    entered = judged(after)[1].findings[0].facts["entered"]
    assert [(call["ranks"], call["op"], call["number"], call["line"]["line"]) for call in entered] == [
        ([0], "all_reduce", 5, 15),
        ([1], "all_reduce", 5, 19),
    ]


def test_a_rank_that_has_not_come_to_a_call_is_no_hang_by_its_recorder_alone() -> None:
    files = {
        "nccl_trace_rank_0": routine(("all_reduce", 19), ("all_reduce", 19)),
        "nccl_trace_rank_1": recorder(entry(1, "all_reduce", 19, retired=True)),
    }
    assert answer(left(**files))[:2] == (Status.ERROR, "inconclusive")
    status, cause, ranks, line = answer(left(out_log=watchdog(0, 2), **files))
    assert (status, cause, ranks, line) == (Status.HANG, "rank_absent", (1,), 19)


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps(_Evil()), "is no instruction for plain values"),
        (recorder(entry(1, "all_reduce", 19, retired=True))[:-20], "not a flight recorder dump"),
        (pickle.dumps({"entries": [{"process_group": 3}]}, protocol=2), "process_group is int, no list"),
        (b"\x1f\x8b\x08\x00packed", "it is packed; unpack it first"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x02\x00", "a program, and no dump of one"),
        (bytes(range(256)) * 20, "binary, and no dump that is known"),
        (b"  \n", "it is empty"),
        (b'{"loss": 3}', "JSON, and neither a flight recorder dump nor stacks of py-spy"),
    ],
)
def test_what_nothing_can_be_made_of_has_one_reason(data: bytes, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = named("some", data)
    assert known.kind is JobFileKind.NOTHING
    assert why in known.reason
    assert "\n" not in known.reason
    assert capsys.readouterr().out == ""


def test_a_core_file_is_answered_with_the_command_for_its_stacks() -> None:
    core = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x04\x00" + b"\0" * 40
    after = left(core_71=core, rank0_log="ready\n")
    assert any("pystack core core_71 > rank3.txt" in how for one in after.missing for how in one.how)


def test_what_would_have_told_more_is_named_with_the_way_to_have_it() -> None:
    after = left(rank0_txt=py_spy("barrier", 7), rank1_log="ready\n")
    assert [one.name for one in after.missing] == [
        "logs of rank 0",
        "stacks of rank 1",
        "flight recorder dumps of every rank",
    ]
    assert all(one.how for one in after.missing)


@pytest.mark.parametrize(
    ("head", "document"),
    [
        (b"\x80\x02}", True),
        (b'{"entries": []}', True),
        (b'[\n  {"pid": 3}]', True),
        (b"[rank0]: Traceback", False),
        (b"[W1123 02:07:28 run.py:874] ", False),
        (b"{loss} is", False),
    ],
)
def test_a_log_is_no_document_for_beginning_with_a_bracket(head: bytes, document: bool) -> None:
    assert is_document(head) is document


PIECES = st.sampled_from(
    [
        "[rank3]: ", "[default1]:", "0: ", "Traceback (most recent call last):\n", '  File "/a.py", line 3, in f\n',
        "Process 7: python\n", 'Thread 7 (idle): "MainThread"\n', "    f (a.py:3)\n", "ValueError: x\n",
        "Thread 0x00007f8f94a266c0 (most recent call first):\n", '  File "/a.py", line 3 in f\n', "\x1b[31m", "\0",
        "Traceback for thread 7 (python) [] (most recent call last):\n", "RANK=3\n", "WORLD_SIZE=9\n", "\n",
        "[rank999999]: ", watchdog(0, 3), behind(1, 2, 1, 3), TIMED_OUT, LIMIT,
        '[{"pid": 7, "frames": []}]', "\x80\x02",
        "srun: error: task 0-9: Killed\n", '{"entries": [', "RuntimeError: " + TIMED_OUT + "\n", "\ud800",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a_1.log", "rank0.txt", "x/attempt_0/1/stderr.log", "b"]), st.lists(PIECES)))
)
def test_whatever_text_was_left_is_read_and_judged(files: list[tuple[str, list[str]]]) -> None:
    read = [read_job_file(name, "".join(some).encode("utf-8", "surrogatepass")) for name, some in files]
    after = read_post_mortem(read, "node")
    judgement, diagnosis = judged(after)
    assert judgement.status in (Status.FAIL, Status.HANG, Status.ERROR)
    assert all(one.confidence < CERTAIN for one in diagnosis.findings) or judgement.status is Status.ERROR


@settings(deadline=None)
@given(st.binary(max_size=400), st.sampled_from([b"", b"\x80\x02", b"[{", b"\x7fELF", b"[rank0]: "]))
def test_whatever_bytes_were_left_are_read_and_judged(data: bytes, head: bytes) -> None:
    judged(read_post_mortem([read_job_file("rank0", head + data)], "node"))


@pytest.mark.parametrize(
    "said",
    [
        traceback(22, "requests.exceptions.ReadTimeout: timed out after 30000 ms"),
        traceback(22, "TimeoutError: Timed out waiting for the lock of the cache"),
        "ERROR store: Error: request timed out after 30000 ms, trying again\n",
    ],
)
def test_a_program_that_waited_for_something_else_than_its_ranks_did_not_hang(said: str) -> None:
    after = left(rank0_log=said, rank1_log="ready\n")
    assert judged(after)[0].status is not Status.HANG
