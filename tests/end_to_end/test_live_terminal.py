"""The command on a terminal of its own: the live view, Ctrl-C, and the screen that stays."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios

import pytest

from .conftest import COMMAND, LIMIT_S
from .jobs import until

WAITS = """import os, sys
open("waits." + os.environ["RANK"], "w").close()
os.read(os.open(sys.argv[1], os.O_RDWR), 1)
"""
ENVIRONMENT = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


class Person:
    """Sits at a terminal of 80 columns and 24 rows, and reads until something stands there."""

    def __init__(self, workspace, *words):
        self.text = ""
        self._sees, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        unwanted = ("NSA_", "_NSA_", "NO_COLOR", "CI")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=workspace.directory,
            env={**inherited, **ENVIRONMENT},
            stdin=program,
            stdout=program,
            stderr=program,
            start_new_session=True,
        )
        os.close(program)

    def reads(self, what=None):
        """Until `what` stands there, or to the end."""
        while what is None or what not in self.text:
            try:
                self.text += os.read(self._sees, 65536).decode()
            except OSError:  # the program has closed the terminal
                assert what is None, f"{what!r} never stood there, but {self.text!r}"
                return

    def closes(self):
        os.close(self._sees)

    def leaves(self):
        self.reads()
        self.closes()
        return self.process.wait(timeout=LIMIT_S)


def test_ctrl_c_is_answered_in_the_live_view_and_the_screen_is_left_in_order(workspace):
    (workspace.directory / "waits.py").write_text(WAITS)
    os.mkfifo(workspace.directory / "pipe")
    person = Person(workspace, "run", "--script", "waits.py", "--", "pipe")
    person.reads("rank 1   start")
    for rank in (0, 1):
        until((workspace.directory / f"waits.{rank}").exists, f"rank {rank} waits")
    person.process.send_signal(signal.SIGINT)
    person.reads("reading stacks, ending the processes, writing the report")
    assert person.leaves() == 130

    assert person.text.count("\x1b[?25l") == person.text.count("\x1b[?25h") == 1
    assert "\x1b[?7l" not in person.text.rpartition("\x1b[?25h")[2]
    stays = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", person.text.rpartition("\x1b[?25h")[2])
    assert "Interrupted: only the runs listed here were judged." in stays
    assert re.search(r"^  page +reports/\S+/report.html", stays, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hang-up", "quit", "closed"])
def test_a_run_whose_terminal_goes_away_is_ended_and_reported(workspace, way):
    (workspace.directory / "waits.py").write_text(WAITS)
    os.mkfifo(workspace.directory / "pipe")
    person = Person(workspace, "run", "--script", "waits.py", "--", "pipe")
    for rank in (0, 1):
        until((workspace.directory / f"waits.{rank}").exists, f"rank {rank} waits")
    if way == "closed":
        person.closes()
    else:
        person.process.send_signal(signal.SIGHUP if way == "hang-up" else signal.SIGQUIT)
        person.reads()
        person.closes()
    assert person.process.wait(timeout=LIMIT_S) == 130
    run = (workspace.directory / "reports" / "latest").resolve()
    assert "interrupted" in (run / "SUMMARY.md").read_text()
