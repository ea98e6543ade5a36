"""The probe in real ranks: the board tells what the program does, and the program does what it did without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ranks import PROGRAMS, Boards, Ended, Forked, ended, environment, fork_ranks, run_forks, wait_for

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import StatusFile

DDP_BLOCKS = str(PROGRAMS / "ddp_blocks.py")
ONE_RANK_WAITS = str(PROGRAMS / "one_rank_waits.py")


def test_losses_and_weights_are_the_same_bit_for_bit_with_and_without_the_probe(tmp_path: Path) -> None:
    with_probe = run_forks(2, DDP_BLOCKS, boards=tmp_path / "boards")
    without = run_forks(2, DDP_BLOCKS, boards=None)
    assert [rank.status for rank in with_probe + without] == [0, 0, 0, 0]
    assert "weights" in without[0].out
    assert [rank.out for rank in with_probe] == [rank.out for rank in without]
    assert [rank.err for rank in with_probe] == [rank.err for rank in without]
    assert not list((tmp_path / "boards").glob("*.trouble.jsonl"))
    _check_the_story(Boards(tmp_path / "boards").all())


def _check_the_story(boards: list[StatusFile]) -> None:
    assert [(board.rank, board.world_size) for board in boards] == [(0, 2), (1, 2)]
    for board in boards:
        ops = [call.op for call in board.calls]
        assert ops == ["init_process_group", *["all_reduce"] * 4, "barrier", "destroy_process_group"]
        assert [step for step, _ in board.steps_s] == [1, 2, 3, 4]
        assert board.exit_s is not None
        assert not board.ended_by_exception
        assert board.events[0].kind == "exit"
        seen = {"start", "imported", "init", "data", "forward", "backward", "optimizer", "step", "collective"}
        assert seen <= set(board.gaps_s)
        reduce = board.calls[1]
        assert (reduce.elements, reduce.dtype, reduce.group, reduce.step) == (1, "float32", "0", 1)
        assert reduce.place is not None
        assert (Path(reduce.place.file).name, reduce.place.function) == ("ddp_blocks.py", "average_loss")
        assert reduce.left_s is not None
        assert reduce.left_s >= reduce.entered_s


def test_a_rank_that_waits_in_a_collective_answers_a_request_for_the_flight_recorder(tmp_path: Path) -> None:
    boards = Boards(tmp_path)
    waiting, late = fork_ranks(2, ONE_RANK_WAITS, boards=tmp_path)
    try:
        call = wait_for(lambda: _open_call(boards, waiting.pid), "rank 0 inside all_reduce")
        assert call == "all_reduce"
        wait_for(lambda: boards.board(waiting.pid).enqueued, "the counters of the flight recorder")
        boards.request_flight(waiting.pid, 7)
        path = tmp_path / protocol.FLIGHT.format(pid=waiting.pid)
        wait_for(path.exists, "the flight file")
        entries = boards.json(protocol.FLIGHT, waiting.pid)["entries"]
        assert entries[-1]["profiling_name"] == "gloo:all_reduce"
        assert not entries[-1]["retired"]
        assert entries[-1]["profiling_name"] == "gloo:all_reduce"
        beat_s = boards.board(waiting.pid).beat_s or 0.0
        wait_for(lambda: (boards.board(waiting.pid).beat_s or 0.0) > beat_s, "another beat while the main thread waits")
    finally:
        ends = [_ended_after_a_line(late), ended(waiting)]
    assert [rank.status for rank in ends] == [0, 0]


def _open_call(boards: Boards, pid: int) -> str | None:
    if not (boards.directory / protocol.STATUS_FILE.format(pid=pid)).exists():
        return None
    calls = boards.board(pid).calls
    return calls[-1].op if calls and calls[-1].left_s is None and calls[-1].op == "all_reduce" else None


def _ended_after_a_line(process: Forked) -> Ended:
    process.stdin.write("\n")
    process.stdin.flush()
    return ended(process)


def test_torchrun_itself_is_no_rank_and_its_ranks_are(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", DDP_BLOCKS, "--steps=1"]
    # Some clusters put RANK into the environment of torchrun itself.
    env = environment(tmp_path, RANK="0", WORLD_SIZE="1")
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [(board.rank, board.world_size) for board in Boards(tmp_path).all()] == [(0, 2), (1, 2)]


LATE = """
import os, torch, torch.distributed as dist
assert "RANK" not in os.environ
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
layer = torch.nn.Linear(2, 2)
layer(torch.ones(2)).sum().backward()
dist.all_reduce(torch.ones(3, dtype=torch.float64))
dist.destroy_process_group()
"""


def test_a_process_without_rank_in_its_environment_becomes_one_at_init_process_group(tmp_path: Path) -> None:
    boards = tmp_path / "boards"
    env = environment(boards, STORE=str(tmp_path / "store"))
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    (board,) = Boards(boards).all()
    assert (board.rank, board.world_size, board.events[0].kind) == (0, 1, "exit")
    assert [(call.op, call.dtype) for call in board.calls][:2] == [
        ("init_process_group", ""),
        ("all_reduce", "float64"),
    ]
    assert {"forward", "backward"} <= set(board.gaps_s)


CHILDREN = """
import os, subprocess, sys
import torch
from torch.utils.data import DataLoader
batches = list(DataLoader(list(range(8)), batch_size=4, num_workers=1))
assert len(batches) == 2
subprocess.run([sys.executable, "-c", "import torch.distributed"], check=True)
child = os.fork()
if child == 0:
    torch.nn.Linear(2, 2)(torch.ones(2))
    os._exit(0)
os.waitpid(child, 0)
"""


def test_workers_tools_and_forked_children_of_a_rank_write_to_no_board(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", CHILDREN, boards=tmp_path)
    assert rank.status == 0, rank.err
    (board,) = Boards(tmp_path).all()
    assert board.pid == rank.pid
    assert {mark.tid for mark in board.events} == {rank.pid}
    assert "forward" not in board.gaps_s
    assert "data" in board.gaps_s
    assert not list(tmp_path.glob("*.trouble.jsonl"))
