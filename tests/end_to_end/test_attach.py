"""`attach PID`: a running job is looked at, judged by the same rules, and left exactly as it was."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nsa_harness.supervisor.capture import procfs

from .conftest import PROGRAMS, Workspace
from .jobs import GATE, TORCHRUN, gate, nsa_harness, opened, running, said, stands, until

QUICK = ("limits.stall_s=3", "limits.open_wait_s=4")
KEPT = ("State", "TracerPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Threads")


def ranks_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """In the order of their ranks."""
    below = psutil.Process(job.pid).children(recursive=True)
    ranks = {one.pid: rank for one in below if (rank := procfs.environment(one.pid).get("RANK"))}  # one may leave here
    return sorted((one for one in below if one.pid in ranks), key=lambda one: ranks[one.pid])


def holds(process: psutil.Process, name: str) -> bool:
    return any(name in link for link in descriptors(process))


def descriptors(process: psutil.Process) -> list[str]:
    home = Path(f"/proc/{process.pid}/fd")
    return sorted(link for name in os.listdir(home) if (link := link_of(home / name)))


def link_of(path: Path) -> str:
    """Empty where a running process has closed it meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def state(process: psutil.Process) -> dict[str, object]:
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    lines = dict(line.split(":", 1) for line in status)
    lines["State"] = "stopped" if lines["State"].strip()[0] in "Tt" else "not stopped"  # who waits wakes now and then
    return {**{name: lines[name] for name in KEPT}, "files": descriptors(process), "words": process.cmdline()}


@contextmanager
def hung_job(workspace: Workspace) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """torchrun with rank 1 at the gate and rank 0 in the collective behind it."""
    pipe = gate(workspace.directory)
    with running([*TORCHRUN, GATE, str(pipe)], workspace) as job:
        until(lambda: len(ranks_of(job)) == 2 and holds(ranks_of(job)[1], "/gate"), "rank 1 stands at the gate")
        yield job, pipe


RANK0_BARRIER = (str(PROGRAMS.parent / "faults" / "groups_rank0_barrier.py"), "fault")
SKIPPED_CALL = (str(PROGRAMS / "diverge.py"), "skips")
EXTRA_HANDLE, SHORTER_LOOP = ((str(PROGRAMS / "two_handles.py"), part) for part in ("extra", "shorter"))
WORK_WAITS = ["Work.wait", "Work.wait"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "cause", "line", "stands_in"),
    [
        (RANK0_BARRIER, "rank0_only_collective", None, ["barrier", "all_reduce (DDP)"]),
        (SKIPPED_CALL, "rank_conditional_collective", "if number == 4 and", ["all_reduce", "barrier"]),
        (EXTRA_HANDLE, "rank0_only_collective", "if part ==", WORK_WAITS),
        (SHORTER_LOOP, "rank_conditional_collective", "for step in", WORK_WAITS),
    ],
)
def test_stacks_alone_name_the_line_that_a_run_with_marks_names(
    workspace: Workspace, program: tuple[str, str], cause: str, line: str | None, stands_in: list[str]
) -> None:
    """A run has more evidence than a look from outside, so it never names a worse line."""
    with running([*TORCHRUN, *program], workspace) as job:
        until(lambda: len(ranks_of(job)) == 2 and all(map(stands, ranks_of(job))), "both ranks stand")
        ran = workspace.harness("attach", str(job.pid), "limits.stall_s=3", "--json", "--out", "looked")
    watched = workspace.outcome_of_script(Path(program[0]), 2, program[1])

    (outcome,) = json.loads((workspace.directory / "looked" / "latest" / "report.json").read_text())["outcomes"]
    told, place = watched["culprit"], watched["culprit"]["place"]
    assert (ran.code, outcome["verdict"], outcome["cause"]) == (124, "HANG", cause)
    assert line is None or line in Path(program[0]).read_text().splitlines()[place["line"] - 1]
    assert (outcome["cause"], outcome["culprit"]["ranks"]) == (watched["cause"], told["ranks"])
    assert [outcome["culprit"]["place"][key] for key in ("file", "line")] == [place[key] for key in ("file", "line")]
    assert outcome["findings"][0]["confidence"] <= watched["findings"][0]["confidence"]
    assert [row["stands_in"] for row in outcome["detail"]["standings"]] == stands_in
    events = {event["event"]: event for line in ran.out.splitlines() if (event := json.loads(line))}
    assert [row["blocked_in"] for row in events["look"]["rows"]] == stands_in
    assert outcome["detail"]["repeat"] is None


HANDLE = (str(PROGRAMS / "handles.py"),)


def test_a_wait_for_a_handle_is_no_lock_and_waits_for_the_other_ranks(workspace: Workspace) -> None:
    """In C++, and without a probe: the native frames alone show what it is."""
    with running([*TORCHRUN, *HANDLE], workspace) as job:
        until(lambda: len(ranks_of(job)) == 2 and all(map(stands, ranks_of(job))), "both ranks stand")
        ran = workspace.harness("attach", str(job.pid), "limits.stall_s=3")

    assert (ran.code, ran.outcome["verdict"]) == (124, "HANG")
    assert ran.outcome["cause"] != "lock_cycle"
    assert [row["stands_in"] for row in ran.outcome["detail"]["standings"]] == ["Work.wait", "barrier"]
    assert [row["waits_for"] for row in ran.outcome["detail"]["standings"]] == ["rank 1", "rank 0"]


def test_a_hung_job_is_proven_and_blamed_and_stays_as_it_was(workspace):
    with hung_job(workspace) as (job, pipe):
        everyone = [psutil.Process(job.pid), *ranks_of(job)]
        looks = [[state(one) for one in everyone]]

        def settled() -> bool:
            time.sleep(0.5)
            looks.append([state(one) for one in everyone])
            return looks[-1] == looks[-2]

        until(settled, "no thread begins any more, and no file is opened")
        before = looks[-1]
        files = {path.name for path in workspace.directory.iterdir()}
        ran = workspace.harness("attach", str(job.pid), *QUICK)
        after = [state(one) for one in everyone]
        opened(pipe)
        assert job.wait(timeout=60) == 0  # it was only late

    outcome = ran.outcome
    assert (ran.code, outcome["verdict"], outcome["kind"]) == (124, "HANG", "starved")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["function"] == "wait_at_the_gate"
    assert before == after
    assert {path.name for path in workspace.directory.iterdir()} - files == {"reports", "out.txt", "err.txt"}
    assert "nsa-harness did not start this job" in " ".join(ran.out.split())


@pytest.mark.slow
def test_a_rank_leads_to_the_others_of_its_job(workspace):
    with hung_job(workspace) as (job, _):
        ran = workspace.harness("attach", str(ranks_of(job)[0].pid), *QUICK)

    assert (ran.code, ran.outcome["culprit"]["ranks"], ran.outcome["victims"]) == (124, [1], [0])


def test_a_job_that_moves_is_said_to_move_and_that_is_no_pass(workspace):
    command = [*TORCHRUN, str(PROGRAMS / "ddp_blocks.py"), "--steps=200000"]
    with running(command, workspace) as job:
        until(lambda: len(ranks_of(job)) == 2, "both ranks are started")
        ran = workspace.harness("attach", str(job.pid), "--json")
        assert job.poll() is None

    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (0, "ERROR", "still_running")
    assert ran.outcome["summary"].startswith("MOVING: ranks 0, 1 move; ranks 0, 1 have no probe")
    events = [json.loads(line) for line in ran.out.splitlines()]
    assert [events[0]["event"], events[-1]["event"], events[-1]["exit_code"]] == ["plan", "done", 0]


@pytest.mark.slow
def test_what_is_not_decided_in_time_is_a_suspicion(workspace):
    with hung_job(workspace) as (job, _):
        ran = workspace.harness("attach", str(job.pid), "--for=4")

    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (125, "ERROR", "suspected")
    assert ran.outcome["summary"] == (
        "SUSPECT: nothing moves, and it is not proven that nothing can: rank 0 waiting, rank 1 waiting;"
        " ranks 0, 1 have no probe, so no step, module or collective of theirs is known"
    )


@pytest.mark.slow
def test_a_job_with_our_boards_is_read_from_them(workspace):
    pipe = gate(workspace.directory)
    process = workspace.start("watch", *QUICK, "--", *TORCHRUN, GATE, str(pipe))
    until(said(workspace, "the job is still running"), "a HANG is told")
    (launcher,) = [one for one in psutil.Process(process.pid).children() if GATE in one.cmdline()]
    looked = subprocess.run(
        nsa_harness("attach", str(launcher.pid), *QUICK, "--out", "looked"),
        cwd=workspace.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    opened(pipe)
    ran = workspace.finished(process)

    (outcome,) = json.loads((workspace.directory / "looked" / "latest" / "report.json").read_text())["outcomes"]
    assert (looked.returncode, outcome["verdict"], outcome["culprit"]["ranks"]) == (124, "HANG", [1])
    assert outcome["detail"]["standings"][0]["stands_in"].startswith("all_reduce")
    assert outcome["detail"]["notes"] == []
    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")


UNLIKE = PROGRAMS / "unlike.py"
UNSHARE = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--map-root-user", "--mount-proc"]
CONTAINERS = shutil.which("unshare") and subprocess.run([*UNSHARE, "true"], check=False, capture_output=True)


def stand(job: subprocess.Popen[bytes], count: int) -> Callable[[], bool]:
    return lambda: len(ranks_of(job)) == count and all(map(stands, ranks_of(job)))


@pytest.mark.slow
@pytest.mark.skipif(not CONTAINERS or CONTAINERS.returncode != 0, reason="no namespace may be made here")
def test_a_job_in_a_container_is_told_with_the_source_that_only_it_sees(workspace: Workspace) -> None:
    hidden = workspace.directory / "hidden"
    hidden.mkdir()
    program = hidden / "train.py"
    inside = f"mount -t tmpfs none {hidden} && cp {UNLIKE} {program} && exec {shlex.join(TORCHRUN)} {program} roots"
    with running([*UNSHARE, "sh", "-c", inside], workspace) as job:
        until(stand(job, 2), "both ranks stand")
        assert not program.exists()
        ran = workspace.harness("attach", str(ranks_of(job)[0].pid), "limits.stall_s=3")

    place = ran.outcome["culprit"]["place"]
    assert (ran.code, ran.outcome["cause"], ran.outcome["culprit"]["ranks"]) == (124, "root_mismatch", [0, 1])
    assert (place["file"], place["line"]) == (str(program), len(UNLIKE.read_text().splitlines()))
    told = ran.outcome["detail"]["stacks"][0]["frames"][0]
    assert told["text"] == "dist.broadcast(torch.ones(4), src=1 - RANK)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "living", "told"),
    [
        ("left", 1, (1, "FAIL", "early_exit", [1])),
        ("roots", 2, (124, "HANG", "root_mismatch", [0, 1])),
    ],
)
def test_ranks_in_one_line_are_told_apart(
    workspace: Workspace, part: str, living: int, told: tuple[int, str, str, list[int]]
) -> None:
    with running([*TORCHRUN, str(UNLIKE), part], workspace) as job:
        until(stand(job, living), "the ranks stand")
        ran = workspace.harness("attach", str(job.pid), "limits.stall_s=3")
    outcome = ran.outcome
    assert (ran.code, outcome["verdict"], outcome["cause"], outcome["culprit"]["ranks"]) == told
    assert outcome["detail"]["ended"] == "not by us: it runs on"


def test_a_process_that_is_gone_or_no_rank_is_exit_2_with_what_to_do(workspace):
    with running(["sleep", "600"], workspace) as other:
        nothing = workspace.harness("attach", str(other.pid))
    gone = workspace.harness("attach", str(other.pid))

    assert (nothing.code, gone.code) == (2, 2)
    assert nothing.err == (
        f"attach: process {other.pid} (sleep 600) is not a rank, and no process below it has RANK or torch;"
        " name torchrun, a rank, or a process above them\n"
    )
    assert gone.err == (
        f"attach: no process {other.pid} is running here; `nsa-harness attach` without a PID finds your job\n"
    )
    assert not (workspace.directory / "reports").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start somebody else's process")
def test_a_process_of_somebody_else_is_exit_2_and_names_sudo(workspace):
    with running(["sleep", "600"], workspace) as other:
        code = (
            "import os; from nsa_harness.errors import NoSuchJob\n"
            "from nsa_harness.supervisor.observe.attach import find_job\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"try: find_job({other.pid})\n"
            "except NoSuchJob as error: print(error.exit_code, error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == (
        f"2 attach: process {other.pid} belongs to user root and may not be inspected;"
        f" `sudo nsa-harness attach {other.pid}`\n",
        "",
    )
