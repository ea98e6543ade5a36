"""Which lines of a program a rank executed, as Python 3.12 and later report them, and what may go wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nsa_harness import protocol
from nsa_harness.core.evidence.coverage import Coverage, read_coverage

BOOTSTRAP = Path(protocol.__file__).parent / "probe" / "bootstrap"


def interpreter(version: str) -> str | None:
    """A Python of this version: this one, one on PATH, or one of pyenv."""
    if "{}.{}".format(*sys.version_info) == version:
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(str(path) for path in root.glob(f"versions/{version}.*/bin/python"))
    candidates = [shutil.which(f"python{version}"), *installed]
    return next((path for path in candidates if path and _starts(path, version)), None)


def _starts(path: str, version: str) -> bool:
    done = subprocess.run([path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False)
    return done.stdout.startswith(f"{version}.")


@pytest.fixture(params=["3.12", "3.13"], scope="module")
def python(request: pytest.FixtureRequest) -> str:
    path = interpreter(request.param)
    return path or pytest.skip(f"there is no Python {request.param} here, and older ones have no sys.monitoring")


class Rank:
    """A process with the probe that has run a program, and what the probe wrote."""

    def __init__(self, python: str, folder: Path, program: str, **env: str) -> None:
        script, boards = folder / "train.py", folder / "boards"
        script.write_text(textwrap.dedent(program).lstrip("\n"))
        boards.mkdir()
        rank = {"RANK": "0", "WORLD_SIZE": "1", protocol.ENV_COVERAGE: "on", "PYTHONPATH": str(BOOTSTRAP), **env}
        known = {name: value for name, value in os.environ.items() if not name.startswith(("_NSA", "PYTHON", "RANK"))}
        self.ended = subprocess.run(
            [python, str(script)],
            env={
                **known,
                **{name: value for name, value in rank.items() if value},
                protocol.ENV_PROBE_DIRECTORY: str(boards),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        self.files = list(boards.glob("*.coverage"))
        notes = [path.read_text() for path in boards.glob("*.trouble.jsonl")]
        self.trouble = [json.loads(line) for note in notes for line in note.splitlines()]

    @property
    def coverage(self) -> Coverage:
        (file,) = self.files
        return read_coverage(file.read_bytes(), 0)

    def lines(self, thread: str = "MainThread") -> list[int]:
        coverage = self.coverage
        return [line.line for line in coverage.lines() if coverage.threads[line.thread] == thread]


BRANCHES = """
    import json, threading
    def helper(count):
        total = 0
        for number in range(count):
            if number % 2:
                total += number
            else:
                total -= number
        return total
    def numbers():
        yield 1
    print(helper(1), list(numbers()), json.dumps([1]))
    helper(2)
    worker = threading.Thread(target=helper, args=(3,), name="loader")
    def late():
        return 5
    def start():
        return late()
    second = threading.Thread(target=start, name="second")
    second.start()
    second.join()
"""


def test_each_own_line_is_there_once_in_the_order_of_its_first_execution(python: str, tmp_path: Path) -> None:
    rank = Rank(python, tmp_path, BRANCHES)
    assert (rank.ended.returncode, rank.ended.stderr, rank.trouble) == (0, "", [])
    assert rank.lines() == [1, 2, 10, 12, 3, 4, 5, 8, 9, 11, 13, 6, 14, 15, 17, 19, 20, 21]
    assert rank.lines("second") == [18, 16]
    assert rank.coverage.files == (str(tmp_path / "train.py"),)
    times = [line.at_s for line in rank.coverage.lines()]
    assert times == sorted(times)


def test_the_lines_survive_sigkill_and_a_forked_child_writes_none(python: str, tmp_path: Path) -> None:
    program = """
        import os, signal
        child = os.fork()
        if child == 0:
            inside = 1
            os._exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGKILL)
        never = 1
    """
    rank = Rank(python, tmp_path, program)
    assert rank.ended.returncode == -signal.SIGKILL
    assert rank.lines() == [1, 2, 3, 6, 7]


def test_a_process_that_is_found_to_be_a_rank_late_has_its_callers_too(python: str, tmp_path: Path) -> None:
    program = """
        import os, sys
        from _nsa_harness.probe import coverage, patches
        def begin():
            coverage.start_coverage(os.environ["_NSA_HARNESS_BOARDS"], patches.TroubleLog("."))
            return 1
        begin()
        later = 2
    """
    rank = Rank(python, tmp_path, program, RANK="")
    program_only = [number for number in rank.lines() if number > 4]
    assert program_only == [5, 7]


def test_where_other_tools_hold_both_numbers_it_steps_aside_and_says_so(python: str, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    taken = "import sys\nfor tool in (3, 4):\n    sys.monitoring.use_tool_id(tool, f'debugger {tool}')\n"
    (tmp_path / "user" / "sitecustomize.py").write_text(taken)
    path = os.pathsep.join([str(BOOTSTRAP), str(tmp_path / "user")])
    rank = Rank(python, tmp_path, "print(1)", PYTHONPATH=path)
    assert (rank.ended.returncode, rank.ended.stdout, rank.files) == (0, "1\n", [])
    (trouble,) = rank.trouble
    assert trouble["piece"] == "coverage"
    assert re.search("debugger 3 and debugger 4", trouble["error"])


def test_another_tool_that_restarts_all_events_adds_no_line_again(python: str, tmp_path: Path) -> None:
    program = """
        import sys
        for number in range(3):
            sys.monitoring.restart_events()
        done = 1
    """
    assert Rank(python, tmp_path, program).lines() == [1, 2, 3, 4]


def test_a_full_file_keeps_what_it_has_and_says_so(python: str, tmp_path: Path) -> None:
    many = "\n".join(f"x = {number}" for number in range(40_000))
    rank = Rank(python, tmp_path, many)
    assert (rank.ended.returncode, rank.coverage.is_complete) == (0, False)
    assert rank.lines()[:3] == [1, 2, 3]
    assert [trouble["piece"] for trouble in rank.trouble] == ["coverage"]


def test_by_default_it_records_only_where_it_costs_nothing(python: str, tmp_path: Path) -> None:
    rank = Rank(python, tmp_path, "import sys; print(sys.version_info >= (3, 13))", **{protocol.ENV_COVERAGE: ""})
    assert [bool(rank.files)] == [json.loads(rank.ended.stdout.lower())]


def test_it_can_be_switched_off(python: str, tmp_path: Path) -> None:
    assert Rank(python, tmp_path, "print(1)", **{protocol.ENV_COVERAGE: "off"}).files == []


@pytest.mark.skipif(hasattr(sys, "monitoring"), reason="this Python has sys.monitoring")
def test_an_older_python_records_nothing_and_notes_nothing(tmp_path: Path) -> None:
    rank = Rank(sys.executable, tmp_path, "print(1)")
    assert (rank.ended.stdout, rank.files, rank.trouble) == ("1\n", [], [])
