"""kill -9 of the controller, of torchrun, of a rank: nothing is left, and what is on disk can be judged."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import psutil
import pytest

from .conftest import processes_of

GONE_S = 5.0
MOMENTS = 10
STEPS = 40


TRAINING = {n: pytest.param(n, marks=pytest.mark.slow) for n in range(MOMENTS)}
WAITING = -1  # the ranks wait, and have no torch: what a kill leaves behind is the same, and comes sooner


def started(workspace, moment):
    """A run that has come to the moment, and its controller."""
    if moment == WAITING:
        return start_waiting(workspace)
    controller = start(workspace)
    reach(workspace, controller, moment)
    return controller


def start(workspace):
    subject = f"extends: base/ddp\nmodel: {{shape: ci}}\ntrain: {{steps: {STEPS}}}\n"
    workspace.scenario("long", f"about: long enough to be killed in\n{subject}")
    return workspace.start("run", "long")


WAITS = "import os, time; open('waits.' + os.environ['RANK'], 'w').close(); time.sleep(600)\n"


def start_waiting(workspace):
    """Both ranks wait; they are ranks without torch, which Ctrl-C need not know."""
    (workspace.directory / "waits.py").write_text(WAITS)
    controller = workspace.start("run", "--script", "waits.py", "--ranks", "2")
    for rank in (0, 1):
        wait_for((workspace.directory / f"waits.{rank}").exists)
    return controller


def wait_for(condition, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("the awaited event did not come")


def reach(workspace, controller, moment):
    """A moment of the run: before the ranks, while they start, in the first steps, later; drawn within."""
    home = lambda: next(iter((workspace.directory / "reports").glob("2*/long")), None)  # noqa: E731
    wait_for(lambda: home() or controller.poll() is not None)
    if moment >= 2:
        wait_for(lambda: len(ranks(workspace)) == 2)
    if moment >= 4:
        heartbeat = home() / "heartbeat_rank0.jsonl"
        wanted = (moment - 3) * 2
        wait_for(lambda: heartbeat.exists() and heartbeat.read_text().count("\n") >= wanted)
    return home()


def ranks(workspace):
    found = {}
    for process in processes_of(workspace.directory):
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found.setdefault(int(rank), process)
    return found


def agent(workspace):
    agents = (p for p in processes_of(workspace.directory) if "distributed.run" in str(p.cmdline()))
    return next((process for process in agents if "RANK" not in process.environ()), None)


def assert_all_gone(workspace, since):
    wait_for(lambda: not processes_of(workspace.directory), limit_s=GONE_S - (time.monotonic() - since))


@pytest.mark.parametrize("moment", [WAITING, *TRAINING.values()])
def test_the_death_of_the_controller_leaves_nothing_and_can_be_judged(workspace, moment):
    controller = started(workspace, moment)
    killed = time.monotonic()
    controller.kill()
    controller.wait()
    assert_all_gone(workspace, killed)

    wait_for(lambda: not _guardians(workspace), limit_s=GONE_S)
    ran = workspace.harness("report")
    assert (ran.outcome["verdict"], ran.outcome["cause"]) == ("ERROR", "interrupted")
    assert ran.code == 125
    assert ran.err == ""


@pytest.mark.parametrize("moment", [WAITING, *TRAINING.values()])
def test_the_death_of_torchrun_is_named_and_its_ranks_are_ended(workspace, moment):
    controller = started(workspace, moment)
    wait_for(lambda: agent(workspace)).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert_all_gone(workspace, killed)

    ran = workspace.finished(controller)
    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (1, "FAIL", "killed")
    assert "launcher" in ran.outcome["summary"]
    _judged_again_alike(workspace, ran)


@pytest.mark.parametrize("moment", [WAITING, *TRAINING.values()])
def test_the_death_of_a_rank_is_named(workspace, moment):
    controller = started(workspace, moment if moment == WAITING else max(moment, 2))
    victim = random.Random(moment).randrange(2)
    wait_for(lambda: ranks(workspace).get(victim)).send_signal(signal.SIGKILL)

    ran = workspace.finished(controller)
    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (1, "FAIL", "killed")
    assert ran.outcome["culprit"]["ranks"] == [victim]
    assert ran.outcome["exit_codes"][str(victim)] == -signal.SIGKILL
    _judged_again_alike(workspace, ran)


def test_ctrl_c_once_ends_the_run_and_reports(workspace):
    controller = start_waiting(workspace)
    os.kill(controller.pid, signal.SIGINT)

    ran = workspace.finished(controller)
    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (130, "ERROR", "interrupted")
    assert list((ran.run_dir / "waits" / "dumps").glob("rank1.*.txt"))


def test_ctrl_c_twice_kills(workspace):
    controller = start_waiting(workspace)
    os.kill(controller.pid, signal.SIGINT)
    os.kill(controller.pid, signal.SIGINT)
    killed = time.monotonic()
    assert_all_gone(workspace, killed)

    assert workspace.finished(controller).code == 130


def _judged_again_alike(workspace, ran):
    before = json.loads((ran.run_dir / "report.json").read_text())
    again = workspace.harness("report")
    after = json.loads((ran.run_dir / "report.json").read_text())
    assert again.code == ran.code
    assert after == before


def _guardians(workspace):
    """Guardians of this workspace's runs: they hold its journal open."""
    return [p for p in psutil.process_iter() if _holds(p, str(workspace.directory.resolve()))]


def _holds(process, directory):
    try:
        guards = "guardian" in process.cmdline()
        return guards and any(file.path.startswith(directory) for file in process.open_files())
    except psutil.Error:
        return False
