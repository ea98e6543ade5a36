"""The line that leaves, and that whoever leaves does so as if nobody looked."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Boards, run_ranks

from nsa_harness import protocol

BY_ARGPARSE = """
import argparse
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int)
    return parser.parse_args(["--width", "wide"])
options()
"""
BY_ITSELF = """
import sys
def verify():
    print("too old", file=sys.stderr)

    sys.exit(3)
verify()
"""
AT_ONCE = """
import os
class Budget:
    def spend(self):

        os._exit(0)
Budget().spend()
"""


@pytest.mark.parametrize(
    ("program", "status", "function"), [(BY_ARGPARSE, 2, "options"), (BY_ITSELF, 3, "verify"), (AT_ONCE, 0, "spend")]
)
def test_the_line_that_leaves_is_known_whoever_leaves_on_its_behalf(
    tmp_path: Path, program: str, status: int, function: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(program)
    (rank,) = run_ranks(1, str(path), boards=tmp_path / "boards")
    seen = Boards(tmp_path / "boards").board(rank.pid).heartbeat_frame
    assert rank.status == status
    assert seen is not None
    assert (seen.file, seen.line, seen.function) == (str(path), 6, function)
    left_from = Boards(tmp_path / "boards").board(rank.pid).exit_chain
    assert [(one.file, one.line) for one in left_from[:1]] == [("train.py", 6)]
    assert left_from[-1].function == "<module>"


GIVES_UP = """
import sys
def read(path):
    return open(path)
def main():
    try:
        read("/nowhere/part-8.pt")
    except OSError as error:
        {leaves}
main()
"""


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        ("sys.exit(1)", "FileNotFoundError"),
        ("sys.exit(str(error))", "FileNotFoundError"),
        ("import os; os._exit(1)", "FileNotFoundError"),
        ("sys.exit(0)", None),
        ("sys.exit()", None),
    ],
)
def test_who_leaves_with_a_failure_while_an_exception_is_handled_leaves_because_of_it(
    tmp_path: Path, leaves: str, told: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(GIVES_UP.format(leaves=leaves))
    (rank,) = run_ranks(1, str(path), boards=tmp_path / "boards")
    files = list((tmp_path / "boards").glob("*.raised.json"))
    assert bool(rank.status) == bool(told)
    assert len(files) == (1 if told else 0)
    if told:
        raised = Boards(tmp_path / "boards").json(protocol.RAISED, rank.pid)
        assert raised["type"] == told
        assert [(one["line"], one["function"]) for one in raised["frames"]] == [(4, "read"), (7, "main")]


def test_a_child_and_another_thread_leave_without_a_word_of_the_rank(tmp_path: Path) -> None:
    code = """
import os, sys, threading
thread = threading.Thread(target=sys.exit)
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    (rank,) = run_ranks(1, "-c", code, boards=tmp_path)
    assert (rank.status, rank.out, rank.err) == (0, "7\n", "")
    assert Boards(tmp_path).board(rank.pid).heartbeat_frame is None


def test_the_end_is_marked_before_the_last_threads_are_joined(tmp_path: Path) -> None:
    code = """
import threading, torch.distributed
def last():
    threading.main_thread().join()
    print(any(b"shutdown" in open(path, "rb").read() for path in boards()))
def boards():
    import glob, os
    return glob.glob(os.path.join(os.environ["_NSA_HARNESS_BOARDS"], "*.board"))
threading.Thread(target=last).start()
"""
    (rank,) = run_ranks(1, "-c", code, boards=tmp_path)
    assert (rank.status, rank.out) == (0, "True\n"), rank.err
    marks = Boards(tmp_path).board(rank.pid).events
    assert "exit" in {mark.kind for mark in marks}


STOPS = """
import os, signal, subprocess, sys
def hold(process):
    os.kill(process.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGCONT)
child = subprocess.Popen(["sleep", "600"])
hold(child)
hold(child)
print(child.pid)
child.kill()
"""


def test_a_process_that_the_program_stops_is_recorded_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(STOPS)
    (rank,) = run_ranks(1, str(path), boards=tmp_path / "boards")
    stopped = Boards(tmp_path / "boards").board(rank.pid).stopped
    assert rank.status == 0
    (lines,) = stopped.values()
    assert list(stopped) == [int(rank.out)]
    assert [(one.file, one.line) for one in lines] == [("train.py", 4), ("train.py", 7)]
