"""The last words of a process, and that the program's own last words stay what they were."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from ranks import Boards, ended, run_ranks, start_ranks, wait_for

from nsa_harness import protocol

RAISES = """
import sys
def step(n):
    raise ValueError("x" * 10000)
def hook(kind, error, traceback):
    print("the user's hook saw", kind.__name__)
    {chain}
{install}
step(1)
"""
ASKED = signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET


def test_the_exception_that_ends_a_program_is_written_down_with_its_frames(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(RAISES.format(chain="", install=""))
    (rank,) = run_ranks(1, str(program), boards=tmp_path / "boards")
    boards = Boards(tmp_path / "boards")
    raised = boards.json(protocol.RAISED, rank.pid)
    assert rank.status == 1
    assert "ValueError: xxx" in rank.err
    assert raised["type"] == "ValueError"
    assert len(raised["message"]) == 4000
    assert raised["frames"] == [
        {"file": str(program), "line": 4, "function": "step"},
        {"file": str(program), "line": 9, "function": "<module>"},
    ]
    board = boards.board(rank.pid)
    assert board.ended_by_exception
    assert board.exit_s is not None
    assert abs(raised["at_ns"] / 1e9 - board.exit_s) < 60
    assert not list((tmp_path / "boards").glob("*.new"))


# The first exception is only shown; the program goes on. The second ends it, but its exit code is 0.
HIDES = """
import atexit, os, sys
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())
print(open(sys.argv[1] + f"/{os.getpid()}.raised.json").read(), flush=True)
atexit.register(os._exit, 0)
raise ValueError("loss is nan")
"""


def test_an_exception_is_called_uncaught_only_if_the_interpreter_found_no_handler(tmp_path: Path) -> None:
    boards = tmp_path / "boards"
    (rank,) = run_ranks(1, "-c", HIDES, str(boards), boards=boards)
    raised = Boards(boards).json(protocol.RAISED, rank.pid)
    assert (rank.status, raised["type"], raised["is_uncaught"]) == (0, "ValueError", True)
    shown = json.loads(rank.out)
    assert (shown["type"], shown["is_uncaught"]) == ("ZeroDivisionError", False)


USES_ALL = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
while True:
    files.append(open(__file__))
"""
HIDDEN = "import torch.distributed"


def test_a_process_without_a_free_descriptor_still_records_its_exception_and_its_open_files(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(USES_ALL)
    (rank,) = run_ranks(1, str(path), boards=tmp_path / "boards")
    raised = Boards(tmp_path / "boards").json(protocol.RAISED, rank.pid)
    assert (rank.status, raised["type"]) == (1, "OSError")
    first, *_, total = [hint["name"] for hint in raised["hints"] if hint["kind"] == "open file"]
    count, _, name = first.partition(" ")
    assert name == str(path)
    assert 32 < int(count) <= int(total) <= 64


def test_a_file_that_hides_a_package_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HIDDEN)
    (tmp_path / "torch.py").touch()
    (rank,) = run_ranks(1, str(path), boards=tmp_path / "boards")
    hints = Boards(tmp_path / "boards").json(protocol.RAISED, rank.pid)["hints"]
    assert hints == [{"kind": "hiding file", "name": str(tmp_path / "torch.py")}]


CHAINED = """
def load():
    raise KeyError("name")
def step():
    try:
        load()
    except KeyError as error:
        raise RuntimeError("no step") from error
try:
    step()
except RuntimeError:
    1 / 0
"""


def test_what_an_exception_was_raised_from_and_what_was_handled_then_are_written_down_too(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-c", CHAINED, boards=tmp_path)
    raised = Boards(tmp_path).json(protocol.RAISED, rank.pid)
    assert raised["type"] == "ZeroDivisionError"
    assert [(one["type"], one["explicit"], one["frames"][0]["function"]) for one in raised["chain"]] == [
        ("RuntimeError", False, "step"),
        ("KeyError", True, "load"),
    ]
    (quiet,) = run_ranks(1, "-c", CHAINED.replace("1 / 0", "raise ValueError from None"), boards=tmp_path)
    assert Boards(tmp_path).json(protocol.RAISED, quiet.pid)["chain"] == []


def test_a_hook_of_the_users_own_still_runs_and_the_exception_is_known_even_if_it_calls_no_other(
    tmp_path: Path,
) -> None:
    code = RAISES.format(chain="", install="sys.excepthook = hook")
    (rank,) = run_ranks(1, "-c", code, boards=tmp_path)
    assert rank.out == "the user's hook saw ValueError\n"
    assert rank.status == 1
    assert rank.err == ""
    assert Boards(tmp_path).json(protocol.RAISED, rank.pid)["frames"][0]["function"] == "step"


def test_sys_exit_is_no_exception_and_keeps_its_status(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-c", "raise SystemExit(7)", boards=tmp_path)
    assert rank.status == 7
    assert not list(tmp_path.glob("*.raised.json"))
    assert not Boards(tmp_path).board(rank.pid).ended_by_exception


def test_an_abort_leaves_the_stacks_of_the_rank(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-c", "import os\ndef fall(): os.abort()\nfall()", boards=tmp_path)
    assert rank.status == -signal.SIGABRT
    stacks = Boards(tmp_path).text(protocol.STACKS, rank.pid)
    assert "Fatal Python error: Aborted" in stacks
    assert " in fall" in stacks


def test_a_faulthandler_of_the_users_own_keeps_its_file(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-X", "faulthandler", "-c", "import os; os.abort()", boards=tmp_path)
    assert "Fatal Python error: Aborted" in rank.err
    assert Boards(tmp_path).text(protocol.STACKS, rank.pid) == ""


def test_a_rank_that_is_asked_writes_its_stacks_and_goes_on(tmp_path: Path) -> None:
    code = "import sys\ndef wait_here(): sys.stdin.readline()\nwait_here()\nprint('went on')"
    (process,) = start_ranks(1, "-c", code, boards=tmp_path)
    boards = Boards(tmp_path)
    wait_for((tmp_path / protocol.STACKS.format(pid=process.pid)).exists, "the stacks file")
    wait_for(lambda: _catches(process.pid, ASKED), "our handler")
    wait_for(lambda: _stacks_after_a_signal(boards, process.pid), "the stack of wait_here")
    assert process.stdin is not None
    process.stdin.write("\n")
    rank = ended(process)
    assert (rank.status, rank.out) == (0, "went on\n")


def _stacks_after_a_signal(boards: Boards, pid: int) -> bool:
    os.kill(pid, ASKED)
    return " in wait_here" in boards.text(protocol.STACKS, pid)


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


OWN_HANDLER = f"""
import signal, sys
signal.signal({int(ASKED)}, lambda number, frame: print("mine", flush=True))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_signal_handlers_of_the_users_own_keep_working(tmp_path: Path) -> None:
    (process,) = start_ranks(1, "-c", OWN_HANDLER, boards=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(ASKED)
    assert process.stdout.readline() == "mine\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process).status == 3
    assert Boards(tmp_path).text(protocol.STACKS, process.pid) == ""


FORKED_ABORT = "import os\nif os.fork() == 0: os.abort()\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"


def test_a_forked_child_that_aborts_does_not_write_into_its_parents_stacks(tmp_path: Path) -> None:
    (rank,) = run_ranks(1, "-c", FORKED_ABORT, boards=tmp_path)
    assert rank.out == "-6\n"
    assert Boards(tmp_path).text(protocol.STACKS, rank.pid) == ""
    assert Boards(tmp_path).board(rank.pid).exit_s is not None


def test_probe_board_leaves_the_last_words_to_the_program(tmp_path: Path) -> None:
    code = "import sys; print(sys.excepthook is sys.__excepthook__); raise ValueError('gone')"
    (rank,) = run_ranks(1, "-c", code, boards=tmp_path, **{protocol.ENV_PROBE: protocol.PROBE_STATUS})
    assert rank.out == "True\n"
    assert [path.name for path in tmp_path.iterdir()] == [protocol.STATUS_FILE.format(pid=rank.pid)]
