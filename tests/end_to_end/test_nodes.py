"""`watch --shared DIR` on each node of a job: two agents on this machine stand for two nodes with two ranks each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsa_harness import protocol

from .conftest import COMMAND, PROGRAMS
from .jobs import until

PROGRAM = str(PROGRAMS / "four_ranks.py")
LIMIT_S = 200


class Nodes:
    """The agents of a job, by the names of their nodes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shared = directory / "job17"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, node: str, *words: str, options: tuple[str, ...] = (), **environment: str) -> None:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=17"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"),
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "SLURM"))}
        with (self.directory / f"{node}.txt").open("wb") as output:
            self.agents[node] = subprocess.Popen(
                [*COMMAND, "watch", "--shared", str(self.shared), *options, "--", *torchrun, PROGRAM, *words],
                env={**inherited, "SLURMD_NODENAME": node, "OMP_NUM_THREADS": "1", **environment},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start_both(self, *words: str, options: tuple[str, ...] = (), **environment: str) -> None:
        for node in ("n1", "n2"):
            self.start(node, *words, options=options, **environment)

    def statuses(self) -> dict[str, int]:
        return {node: agent.wait(timeout=LIMIT_S) for node, agent in self.agents.items()}

    def text(self, node: str) -> str:
        return (self.directory / f"{node}.txt").read_text()

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        return list(json.loads((self.shared / "report.json").read_text())["outcomes"])

    @property
    def outcome(self) -> dict[str, Any]:
        (outcome,) = self.outcomes
        return outcome

    def state(self, node: str, attempt: str = "four_ranks") -> dict[str, Any]:
        try:
            return dict(json.loads((self.shared / attempt / "nodes" / node / "state.json").read_text()))
        except (OSError, ValueError):
            return {}

    def node_of(self, rank: int) -> str:
        return next(node for node in self.agents if rank in self.state(node)["ranks"])

    def coordinator(self) -> str:
        paths = list(self.shared.glob("*/coordinator.json"))
        return str(json.loads(paths[-1].read_text())["holder"]) if paths else ""

    def processes(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter() if self._is_ours(one)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            tag = process.environ().get(protocol.ENV_RUN, "")
            return not is_dead and tag.startswith("job17-") and process.cwd() == str(self.directory)
        except psutil.Error:
            return False


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    both = Nodes(tmp_path)
    yield both
    left = [*both.processes(), *(psutil.Process(one.pid) for one in both.agents.values() if one.poll() is None)]
    for process in left:
        process.kill()
    assert left == []


def test_a_job_on_two_nodes_that_ends_well_is_one_pass(nodes: Nodes) -> None:
    nodes.start_both("nothing")
    assert nodes.statuses() == {"n1": 0, "n2": 0}

    outcome = nodes.outcome
    assert (outcome["verdict"], outcome["exit_codes"]) == ("PASS", {str(rank): 0 for rank in range(4)})
    note = next(
        note for note in outcome["detail"]["notes"] if note.startswith("observed by an agent on each of 2 nodes")
    )
    assert "n1 (ranks " in note
    assert "its clock agrees within 0." in note


def test_a_deadlock_on_one_rank_is_proven_across_nodes_and_names_node_rank_and_line(nodes: Nodes) -> None:
    nodes.start_both("lock", options=("--on-hang=kill", "limits.stall_s=3"))
    assert nodes.statuses() == {"n1": 124, "n2": 124}

    outcome, node = nodes.outcome, nodes.node_of(3)
    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "deadlock", "lock_cycle")
    assert outcome["culprit"]["ranks"] == [3]
    line = outcome["culprit"]["place"]["line"]
    assert Path(PROGRAM).read_text().splitlines()[line - 1].strip() == "lock.acquire()  # never released"
    assert outcome["summary"].startswith(f"rank 3 ({node}) waits for a lock")
    assert {row["rank"]: row["coordinates"] for row in outcome["detail"]["standings"]} == {
        rank: nodes.node_of(rank) for rank in range(4)
    }


def test_a_rank_that_is_killed_is_named_with_its_node(nodes: Nodes) -> None:
    nodes.start_both("kill")
    assert nodes.statuses() == {"n1": 1, "n2": 1}

    outcome = nodes.outcome
    assert (outcome["verdict"], outcome["cause"], outcome["culprit"]["ranks"]) == ("FAIL", "killed", [3])
    assert outcome["summary"].startswith(f"rank 3 ({nodes.node_of(3)}) was killed by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_no_hang(nodes: Nodes) -> None:
    nodes.start_both("sleep", options=("limits.stall_s=3",))
    assert nodes.statuses() == {"n1": 0, "n2": 0}
    assert nodes.outcome["verdict"] == "PASS"
    said = nodes.text("n1") + nodes.text("n2")
    assert "stall: no rank of 2 nodes has made progress for" in said
    assert "recovered: progress again" in said


def waiting(nodes: Nodes, *options: str) -> Path:
    """A job whose rank 3 waits for the file that is returned."""
    file = nodes.directory / "go"
    nodes.start_both("wait", str(file), options=options)
    until(lambda: all(_in_third_step(nodes, node) for node in nodes.agents), "all ranks are in their third step", 120.0)
    return file


def _in_third_step(nodes: Nodes, node: str) -> bool:
    state = nodes.state(node)
    return len(state.get("living_ranks", ())) == 2 and (state["quiet_s"] or 0.0) > 1.5 and state["stall_s"] < 100.0


@pytest.mark.slow
def test_a_hang_that_ends_is_retracted_on_all_nodes(nodes: Nodes) -> None:
    file = waiting(nodes, "limits.stall_s=3", "limits.open_wait_s=4")
    until(lambda: (nodes.shared / "report.json").exists(), "the hang is reported", 60.0)
    assert (nodes.outcome["verdict"], nodes.outcome["culprit"]["ranks"]) == ("HANG", [3])
    assert "HANG" in nodes.text("n1")
    assert "HANG" in nodes.text("n2")
    file.touch()
    assert nodes.statuses() == {"n1": 0, "n2": 0}
    assert nodes.outcome["verdict"] == "PASS"
    assert [one["code"] for one in nodes.outcome["findings"]] == ["retracted_hang"]


@pytest.mark.slow
def test_when_the_coordinator_is_killed_another_agent_finishes(nodes: Nodes) -> None:
    waiting(nodes, "--on-hang=kill", "limits.stall_s=3", "limits.open_wait_s=20")
    first = nodes.coordinator()
    nodes.agents[first].kill()
    second = next(node for node in nodes.agents if node != first)
    until(lambda: nodes.coordinator() == second, "the other agent has taken over", 60.0)
    # The ranks of the killed agent live on, and nobody observes them.
    until(lambda: (nodes.shared / "report.json").exists(), "a report", 60.0)
    assert (nodes.outcome["verdict"], nodes.outcome["cause"]) == ("ERROR", "node_lost")
    assert nodes.outcome["summary"].startswith(f"{first}, with 2 of the 4 ranks, stopped reporting")
    (nodes.directory / "go").touch()
    assert nodes.agents[second].wait(timeout=LIMIT_S) == 0
    until(lambda: not nodes.processes(), "the job of the killed agent ends")


@pytest.mark.slow
def test_a_node_that_is_lost_with_its_ranks_is_named(nodes: Nodes) -> None:
    waiting(nodes)
    lost = nodes.node_of(3)
    agent = psutil.Process(nodes.agents[lost].pid)
    for process in [agent, *agent.children(recursive=True)]:
        process.kill()
    until(lambda: (nodes.shared / "report.json").exists(), "a report", 60.0)
    other = next(node for node in nodes.agents if node != lost)
    nodes.agents[other].send_signal(signal.SIGTERM)
    nodes.agents[other].wait(timeout=LIMIT_S)
    assert (nodes.outcome["verdict"], nodes.outcome["cause"]) == ("ERROR", "node_lost")
    assert nodes.outcome["summary"].startswith(f"{lost}, with 2 of the 4 ranks, stopped reporting")


@pytest.mark.slow
def test_a_node_that_never_comes_is_named(nodes: Nodes) -> None:
    nodes.start("n1", "nothing", options=("limits.start_s=4",), SLURM_JOB_ID="17", SLURM_JOB_NODELIST="n[1-2]")
    until(lambda: (nodes.shared / "report.json").exists(), "a report", 60.0)
    assert (nodes.outcome["verdict"], nodes.outcome["cause"]) == ("ERROR", "node_lost")
    assert nodes.outcome["summary"].startswith("n2 never came")
    nodes.agents["n1"].send_signal(signal.SIGTERM)
    assert nodes.statuses()["n1"] != 0


@pytest.mark.slow
def test_a_requeued_job_is_another_attempt_and_another_job_is_refused(nodes: Nodes) -> None:
    slurm = {"SLURM_JOB_ID": "17"}
    nodes.start_both("kill", **slurm)
    assert nodes.statuses() == {"n1": 1, "n2": 1}
    nodes.start_both("nothing", SLURM_RESTART_COUNT="1", **slurm)
    assert nodes.statuses() == {"n1": 0, "n2": 0}
    assert [(one["attempt"], one["verdict"]) for one in nodes.outcomes] == [(1, "FAIL"), (2, "PASS")]

    nodes.start("n1", "nothing", SLURM_JOB_ID="18")
    assert nodes.statuses()["n1"] == 2
    assert "it belongs to another job (Slurm job 17), and this is Slurm job 18" in nodes.text("n1")


@pytest.mark.slow
def test_a_shared_directory_that_can_no_longer_be_used_does_not_end_the_job(nodes: Nodes) -> None:
    file = waiting(nodes)
    nodes.shared.rename(nodes.directory / "gone")
    nodes.shared.write_text("a file in its place")
    file.touch()
    assert nodes.statuses() == {"n1": 0, "n2": 0}
    assert "rank 3 done" in nodes.text("n1") + nodes.text("n2")
