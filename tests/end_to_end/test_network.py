"""Jobs on two hosts, which are network namespaces, and what `watch` says of a network that does not work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from .jobs import nsa_harness, until
from .network_lab import Network, network

PORT = "29400"
PROGRAM = """
import os, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def ask_store():  # like NCCL's monitor, which asks as long as the rank lives
    store = dist.distributed_c10d._get_default_store()
    while True:
        store.check(["a rank dumps its stacks"])
        time.sleep(0.2)
if "ASKS" in os.environ:
    threading.Thread(target=ask_store, daemon=True).start()
gradients = torch.ones(int(os.environ.get("ELEMENTS", "1000")))
for step in range(int(os.environ["STEPS"])):
    if step == int(os.environ.get("RECEIVES_IN", "-1")) and dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()
    print("step", step, flush=True)
dist.destroy_process_group()
"""


class Job:
    """A job with one rank on each of two hosts. Each host runs `nsa-harness watch -- torchrun`.

    `shared`: the options with which the two commands write one report; otherwise, each writes its own.
    """

    def __init__(
        self, hosts: Network, directory: Path, *, endpoint: str = "", shared: Sequence[str] = (), **environment: str
    ) -> None:
        self.directory = directory
        program = directory / "train.py"
        program.write_text(PROGRAM)
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": "1", **environment}
        self.commands: list[subprocess.Popen[bytes]] = []
        for host in (1, 2):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job",
                "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint or hosts.address(1)}:{PORT}",
                f"--rdzv-conf=is_host={int(host == 1)}", f"--local-addr={hosts.address(host)}", str(program),
            ]  # fmt: skip
            place = f"--shared={directory / 'job'}" if shared else f"--out={directory / f'host{host}'}"
            words = nsa_harness("watch", place, *shared, "--", *torchrun)
            self.commands.append(hosts.start(host, words, self.log(host), variables, directory))

    def log(self, host: int) -> Path:
        return self.directory / f"host{host}.txt"

    def says(self, host: int, *words: str) -> bool:
        """Whether one line of a host's output contains all words."""
        return any(all(word in line for word in words) for line in self.log(host).read_text().splitlines())

    def outcome(self, host: int) -> dict[str, Any]:
        (report,) = (self.directory / f"host{host}").glob("2*/report.json")
        (outcome,) = json.loads(report.read_text())["outcomes"]
        return outcome

    def whole(self) -> dict[str, Any]:
        """Return the outcome of the report about both hosts."""
        (outcome,) = json.loads((self.directory / "job" / "report.json").read_text())["outcomes"]
        return outcome

    def end(self) -> None:
        family = [
            process
            for command in self.commands
            if command.poll() is None
            for process in psutil.Process(command.pid).children(recursive=True)
        ]
        for process in family:
            with_signal(process, signal.SIGKILL)
        for command in self.commands:
            command.kill()
            command.wait()


def with_signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@contextmanager
def job(hosts: Network, directory: Path, **options: Any) -> Iterator[Job]:
    started = Job(hosts, directory, **options)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network() as both:
        yield both


def test_a_port_that_a_firewall_blocks_is_named_long_before_torchrun_gives_up(hosts: Network, tmp_path: Path) -> None:
    hosts.block_port(1, PORT)
    with job(hosts, tmp_path, STEPS="1") as blocked:
        address = f"{hosts.address(1)}:{PORT}"
        until(lambda: blocked.says(2, "the launcher has been trying to connect to", address), "the port is named")
        assert blocked.commands[1].poll() is None
        assert not blocked.says(1, "trying to connect")  # the host of the port has nothing to connect to


def test_a_host_name_that_does_not_resolve_is_named(hosts: Network, tmp_path: Path) -> None:
    with job(hosts, tmp_path, endpoint="no-such-host.invalid", STEPS="1") as lost:
        until(lambda: lost.says(1, "the host no-such-host.invalid, which has no address here"), "the name is told")


@pytest.mark.slow
def test_a_launcher_that_gave_up_at_a_blocked_port_failed_for_it(hosts: Network, tmp_path: Path) -> None:
    hosts.block_port(1, PORT)
    with job(hosts, tmp_path, STEPS="1") as blocked:
        blocked.commands[1].wait(200)
        outcome = blocked.outcome(2)
        assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "infra")
        assert f"tried to connect to {hosts.address(1)}:{PORT}" in outcome["findings"][0]["claim"]


@pytest.mark.slow
def test_a_slow_network_is_named_and_a_fast_one_is_not(hosts: Network, tmp_path: Path) -> None:
    for name in ("fast", "slow"):
        directory = tmp_path / name
        directory.mkdir()
        with job(hosts, directory, STEPS="60", ELEMENTS="500000") as training:
            if name == "slow":
                until(lambda training=training: training.says(1, "step 5"), "the job trains")
                hosts.slow_down(2, "20mbit")
            assert [command.wait(250) for command in training.commands] == [0, 0]
            for host in (1, 2):
                outcome = training.outcome(host)
                slow = [found["claim"] for found in outcome["findings"] or [] if found["code"] == "slow_link"]
                assert outcome["verdict"] == "PASS"
                assert len(slow) == (name == "slow"), slow
                assert all(f"from {hosts.address(host)} to {hosts.address(3 - host)} is slow" in text for text in slow)


SHARED = ("--on-hang=kill", "limits.stall_s=6", "limits.open_wait_s=25")


@pytest.mark.slow
def test_a_cable_that_is_cut_in_a_collective_is_a_fault_of_the_transport_between_two_addresses(
    hosts: Network, tmp_path: Path
) -> None:
    with job(hosts, tmp_path, shared=SHARED, STEPS="1000000") as training:
        until(lambda: training.says(1, "step 50"), "the job trains")
        hosts.cut(2)
        assert [command.wait(250) for command in training.commands] == [124, 124]
        outcome = training.whole()
        claim = outcome["findings"][0]["claim"]
        assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "transport")
        assert "bytes of rank" in claim
        assert [found["code"] for found in outcome["findings"]] == ["transport"]
        assert hosts.address(1) in claim
        assert hosts.address(2) in claim


@pytest.mark.slow
def test_a_network_that_is_cut_for_some_seconds_costs_no_verdict(hosts: Network, tmp_path: Path) -> None:
    with job(hosts, tmp_path, shared=SHARED, STEPS="20000") as training:
        until(lambda: training.says(1, "step 50"), "the job trains")
        hosts.cut(2)
        time.sleep(5)  # the length of the fault
        hosts.heal(2)
        assert [command.wait(250) for command in training.commands] == [0, 0]
        assert training.whole()["verdict"] == "PASS"


@pytest.mark.slow
def test_the_loopback_interface_is_named_as_the_wrong_one(hosts: Network, tmp_path: Path) -> None:
    with job(hosts, tmp_path, shared=SHARED, STEPS="1", GLOO_SOCKET_IFNAME="lo") as confused:
        assert 0 not in [command.wait(250) for command in confused.commands]
        outcome = confused.whole()
        assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "infra")
        assert "at a loopback address" in outcome["findings"][0]["claim"]
        assert "GLOO_SOCKET_IFNAME" in outcome["findings"][0]["advice"]


@pytest.mark.slow
def test_large_packets_that_a_switch_drops_are_a_fault_of_the_transport(hosts: Network, tmp_path: Path) -> None:
    with job(hosts, tmp_path, shared=SHARED, STEPS="1000000", ELEMENTS="100000") as training:
        until(lambda: training.says(1, "step 50"), "the job trains")
        hosts.drop_large_packets(2, 600)
        assert [command.wait(250) for command in training.commands] == [124, 124]
        assert (training.whole()["verdict"], training.whole()["cause"]) == ("HANG", "transport")


@pytest.mark.slow
def test_a_hang_is_proven_while_ranks_ask_the_store_of_another_host(hosts: Network, tmp_path: Path) -> None:
    limits = ("--on-hang=kill", "limits.stall_s=6", "limits.open_wait_s=600", "limits.deadline_s=120")
    with job(hosts, tmp_path, shared=limits, STEPS="50", RECEIVES_IN="20", ASKS="1") as waiting:
        assert [command.wait(250) for command in waiting.commands] == [124, 124]
        outcome = waiting.whole()
        assert (outcome["verdict"], outcome["kind"]) == ("HANG", "deadlock")


@pytest.mark.slow
def test_a_hang_is_proven_while_ranks_ask_the_store_that_rank_0_serves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 STEPS=50 RECEIVES_IN=20 ASKS=1"
    ranks = " ".join(f"RANK={rank} LOCAL_RANK={rank} {sys.executable} train.py &" for rank in (0, 1))
    limits = ("limits.stall_s=6", "limits.open_wait_s=600", "limits.deadline_s=120")
    words = nsa_harness(
        "watch", "--on-hang=kill", "--out=out", *limits, "--", "bash", "-c", f"export {start}; {ranks} wait"
    )
    assert subprocess.run(words, cwd=tmp_path, timeout=250, check=False).returncode == 124
    (report,) = (tmp_path / "out").glob("2*/report.json")
    (outcome,) = json.loads(report.read_text())["outcomes"]
    assert (outcome["verdict"], outcome["kind"]) == ("HANG", "deadlock")
