"""Programs of strangers, with handlers, launchers and workers of their own: the probe in them changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PROGRAMS, Boards, Ended, ended, environment, python, run_forks, run_ranks, start_ranks

from nsa_harness import protocol

HANDLERS = str(PROGRAMS / "guest_handlers.py")
SPAWN = str(PROGRAMS / "guest_spawn.py")
COMPILED = str(PROGRAMS / "guest_compiled.py")
RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def test_every_handler_of_the_program_sees_what_it_saw_without_us(tmp_path: Path) -> None:
    with_us, without = _after_a_signal(tmp_path), _after_a_signal(None)
    assert (with_us.status, with_us.out, with_us.err) == (without.status, without.out, without.err)
    lines = with_us.out.splitlines()
    assert lines[:5] == [
        "threading.excepthook KeyError",
        *(f"signal {name} True" for name in ("SIGUSR1", "SIGTERM", "SIGALRM", "SIGCHLD")),
    ]
    assert lines[5:] == [
        "signal SIGALRM True",
        "ready",
        "signal SIGUSR1 True",
        "faulthandler True",
        "excepthook ValueError the end",
        "last registered",
        "first registered",
    ]
    raised = Boards(tmp_path).json(protocol.RAISED, with_us.pid)
    assert (raised["type"], raised["message"]) == ("ValueError", "the end")
    assert not list(tmp_path.glob("*.trouble.jsonl"))


def _after_a_signal(boards: Path | None) -> Ended:
    """The signal comes from outside, so the kernel chooses the thread that takes it."""
    (process,) = start_ranks(1, HANDLERS, boards=boards)
    assert process.stdout is not None
    said = []
    while not said or said[-1] not in ("ready\n", ""):
        said.append(process.stdout.readline())
    os.kill(process.pid, signal.SIGUSR1)
    rest = ended(process)
    return Ended(pid=rest.pid, status=rest.status, out="".join(said) + rest.out, err=rest.err)


def test_ranks_of_mp_spawn_are_ranks_and_their_loader_workers_are_none(tmp_path: Path) -> None:
    boards = tmp_path / "boards"
    launcher = ended(python(SPAWN, str(tmp_path / "store"), boards=boards))
    assert (launcher.status, launcher.out, launcher.err) == (0, "", "")
    found = Boards(boards).all()
    assert [(board.rank, board.world_size) for board in found] == [(0, 2), (1, 2)]
    assert launcher.pid not in {board.pid for board in found}
    assert all(board.exit_s is not None or board.calls for board in found)
    assert not list(boards.glob("*.trouble.jsonl"))


SRUN = """
import os
os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=int(os.environ["RANK"]), world_size=2)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""


def test_a_program_under_srun_that_sets_its_own_rank_is_found(tmp_path: Path) -> None:
    shared = {"SLURM_NTASKS": "2", "STORE": str(tmp_path / "store")}
    boards = tmp_path / "boards"
    processes = [python("-c", SRUN, boards=boards, SLURM_PROCID=str(rank), **shared) for rank in range(2)]
    ends = [ended(process) for process in processes]
    assert [(rank.status, rank.err) for rank in ends] == [(0, ""), (0, "")]
    found = Boards(boards).all()
    assert [(board.rank, board.pid) for board in found] == [(0, ends[0].pid), (1, ends[1].pid)]
    assert [[call.op for call in board.calls][:2] for board in found] == [["init_process_group", "all_reduce"]] * 2


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_interpreter_that_takes_no_guests_runs_without_one(tmp_path: Path, option: str) -> None:
    process = ended(python(option, "-c", "print('ran')", boards=tmp_path, **RANK))
    assert (process.status, process.out, process.err) == (0, "ran\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_usercustomize_of_the_users_own_still_runs(tmp_path: Path) -> None:
    # A virtual environment has no user site: the interpreter beneath it has.
    interpreter = os.path.realpath(sys.executable)
    env = environment(tmp_path / "boards", **RANK, PYTHONUSERBASE=str(tmp_path / "user"))
    command = [interpreter, "-c", "import site; print(site.getusersitepackages())"]
    site = Path(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip())
    site.mkdir(parents=True)
    (site / "usercustomize.py").write_text("print('the user was here')\n")
    done = subprocess.run([interpreter, "-c", "print('ran')"], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("the user was here\nran\n", "")
    assert len(Boards(tmp_path / "boards").all()) == 2


LATE = """
import sys
def begin():
    import torch
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
assert "torch" not in sys.modules
begin()
"""


def test_torch_that_is_imported_late_in_a_function_is_met_there(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-c", LATE, boards=tmp_path)
    assert (rank.status, rank.err) == (0, "")
    board = Boards(tmp_path).board(rank.pid)
    assert [step for step, _ in board.steps_s] == [1]
    assert {"imported", "forward", "backward", "optimizer", "step"} <= set(board.gaps_s)


@pytest.mark.slow
def test_a_compiled_step_has_as_many_operations_graphs_and_breaks_with_the_probe(tmp_path: Path) -> None:
    (with_us,) = run_ranks(1, COMPILED, boards=tmp_path)
    (without,) = run_ranks(1, COMPILED, boards=None)
    assert (with_us.status, with_us.out, with_us.err) == (0, without.out, without.err)
    assert with_us.out.startswith("[")
    assert not list(tmp_path.glob("*.trouble.jsonl"))


SYNCHRONIZES = """
import sys
import torch, torch.distributed as dist
asked = []
torch.cuda.synchronize = torch.cuda.current_stream = lambda *arguments, **options: asked.append("synchronize")
torch.Tensor.item = torch.Tensor.cpu = torch.Tensor.tolist = lambda *arguments: asked.append("tensor")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4)).sum().backward()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    optimizer.step()
print(asked)
"""


def test_the_probe_asks_no_device_and_reads_no_value(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", SYNCHRONIZES, str(tmp_path / "store"), boards=tmp_path / "boards")
    assert (rank.status, rank.out, rank.err) == (0, "[]\n", "")
    assert [step for step, _ in Boards(tmp_path / "boards").board(rank.pid).steps_s] == [1, 2, 3]


FAILS_ONCE = """
import os, sys
import torch, torch.distributed as dist
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = sys.argv[1] + attempt
dist.init_process_group("gloo", init_method="file://" + store, rank=int(os.environ["RANK"]), world_size=2)
dist.all_reduce(torch.ones(1))
if attempt == "0" and dist.get_rank() == 1:
    raise RuntimeError("the first attempt fails")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_restarted_rank_has_a_board_of_its_own_and_the_dead_one_keeps_its(tmp_path: Path) -> None:
    program, boards = tmp_path / "train.py", tmp_path / "boards"
    program.write_text(FAILS_ONCE)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    done = ended(python(*launcher, str(program), str(tmp_path / "store"), boards=boards))
    assert done.status == 0, done.err
    found = sorted(Boards(boards).all(), key=lambda board: (board.created_s, board.rank))
    first, second = found[:2], found[2:]
    assert [sorted(board.rank for board in lives) for lives in (first, second)] == [[0, 1], [0, 1]]
    assert len({board.pid for board in found}) == 4
    assert next(board for board in first if board.rank == 1).ended_by_exception
    assert [board.ended_by_exception for board in second] == [False, False]
    assert [board.calls[-1].op for board in second] == ["destroy_process_group"] * 2
    (culprit,) = (board.pid for board in first if board.rank == 1)
    assert Boards(boards).json(protocol.RAISED, culprit)["message"] == "the first attempt fails"
