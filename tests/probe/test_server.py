"""The worker server in a rank: it answers where Python cannot, and nobody notices that it is there."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ranks import BOOTSTRAP, Boards, ended, fork_ranks, python, run_forks, wait_for

from nsa_harness import protocol
from nsa_harness.supervisor.capture.recorder import query_flight_recorder
from nsa_harness.supervisor.capture.snapshot import StackSampler

RANK = {"RANK": "0", "WORLD_SIZE": "1"}
HOLDS_THE_GIL = """
import ctypes, os, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print("ready", flush=True)
ctypes.PyDLL(None).sleep(600)
"""


def test_a_rank_that_holds_the_gil_in_native_code_gives_its_flight_recorder(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    (process,) = fork_ranks(1, "-c", HOLDS_THE_GIL, boards=tmp_path, STORE=store)
    try:
        assert process.stdout.readline() == "ready\n"
        boards = Boards(tmp_path)
        # Its beat has stopped for good: what is asked on the board is never answered.
        wait_for(lambda: boards.board(process.pid).latest_event, "a mark")
        answer = json.loads(query_flight_recorder(tmp_path, process.pid, limit_s=60.0))
        threads = _threads_of_the_server(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert [entry["profiling_name"] for entry in answer["entries"]] == ["gloo:all_reduce"]
    assert threads
    caught = [signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD, signal.SIGINT]
    assert all(blocked >> (number - 1) & 1 for blocked in threads for number in caught)


def _threads_of_the_server(pid: int) -> list[int]:
    """Their masks of blocked signals."""
    masks = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "pt_workerserver":
            lines = (task / "status").read_text().splitlines()
            masks += [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
    return masks


FORKS = """
import os, sys, torch.distributed
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_that_exits_takes_no_server_with_it_and_no_parent(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", FORKS, boards=tmp_path)
    assert (rank.status, rank.out, rank.err) == (0, "5\n", "")
    assert (tmp_path / protocol.SOCKET.format(pid=rank.pid)).is_socket()


EXITS = """
import os, sys
import torch, torch.distributed
sys.path.insert(0, sys.argv[1])
from nsa_harness.probe.heartbeat import start_worker_server
from nsa_harness.supervisor.capture.recorder import query_flight_recorder
from pathlib import Path
statuses = []
for number in range(20):
    child = os.fork()
    if child == 0:
        start_worker_server(torch, sys.argv[2])
        if number % 2:
            query_flight_recorder(Path(sys.argv[2]), os.getpid(), limit_s=60.0)
        sys.exit(number)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(statuses == list(range(20)))
"""


@pytest.mark.slow
def test_twenty_processes_with_a_server_exit_as_they_would_without(tmp_path: Path) -> None:
    process = ended(python("-c", EXITS, str(BOOTSTRAP.parents[2]), str(tmp_path), boards=None))
    assert (process.status, process.out, process.err) == (0, "True\n", "")
    sockets = list(tmp_path.iterdir())
    assert len(sockets) == 20
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}


def test_a_directory_whose_path_is_longer_than_a_sockets_address_will_do(tmp_path: Path) -> None:
    boards = tmp_path / ("d" * 100) / ("e" * 100)
    code = "import sys, torch.distributed\nprint('ready', flush=True)\nsys.stdin.readline()"
    (process,) = fork_ranks(1, "-c", code, boards=boards)
    assert process.stdout.readline() == "ready\n"
    answer = json.loads(query_flight_recorder(boards, process.pid, limit_s=60.0))
    rank = ended(process)
    assert "pg_status" in answer
    assert (rank.status, rank.err) == (0, "")


def test_probe_board_starts_no_server(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", "import torch.distributed", boards=tmp_path, **{protocol.ENV_PROBE: "board"})
    assert [path.name for path in tmp_path.iterdir()] == [protocol.STATUS_FILE.format(pid=rank.pid)]


FULL_RECORDER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
one = torch.ones(3)
for _ in range(2000):
    dist.all_reduce(one)
print("ready", flush=True)
sys.stdin.readline()
"""
LOOKS = 10


def test_a_rank_that_is_looked_at_again_and_again_grows_no_further(tmp_path: Path) -> None:
    """The worker server's threads keep 12 MB each: asked of it once a minute, that looks like a leak of the job."""
    (process,) = fork_ranks(1, "-c", FULL_RECORDER, boards=tmp_path, STORE=str(tmp_path / "store"))
    camera = StackSampler(origin_ns=0, probe_dir=tmp_path, dumps=tmp_path / "dumps")
    try:
        assert process.stdout.readline() == "ready\n"
        wait_for(lambda: Boards(tmp_path).board(process.pid).beat_s, "a beat")
        seen = [
            camera.take(0, {0: process.pid}, writes_dumps=False, prefers_heartbeat=True).ranks[0] for _ in range(LOOKS)
        ]
    finally:
        process.kill()
        process.communicate()
    # A look at a rank that has moved leaves its recorder alone; it may still move before the second look.
    assert all(len(one.collectives) > 0 for one in seen[2:])
    early, late = (one.process.rss_bytes for one in (seen[2], seen[-1]) if one.process)
    assert late - early < 16 << 20
