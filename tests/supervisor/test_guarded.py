"""A run whose guardian is killed: another one takes its place, and the run is what it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import spec
from living import wait_for

from nsa_harness.core.plan import Launcher
from nsa_harness.supervisor.launch.launcher import LaunchedRun, launch
from nsa_harness.supervisor.launch.reaper import process_identity
from nsa_harness.supervisor.storage.journals import Journals
from nsa_harness.supervisor.storage.rundir import AttemptDir

PATIENCE_S = 30.0


class Launched:
    """A command under guard; what it says is in its output, and a file lets it go on."""

    def __init__(self, home: Path, source: str) -> None:
        self.attempt = AttemptDir(home / "run")
        self.attempt.path.mkdir()
        self.go = home / "go"
        os.mkfifo(self.go)
        command = (sys.executable, "-I", "-S", "-u", "-c", source, str(self.go))
        plain = spec(program=command, launcher=Launcher.PLAIN, ranks=2)
        self.guarded: LaunchedRun = launch(plain, self.attempt, "off")
        self.said: list[dict[str, Any]] = []

    def hear(self, event: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def heard() -> bool:
            self.said += self.guarded.events(0.05)
            found[:] = [one for one in self.said if one["event"] == event]
            return bool(found)

        wait_for(heard, event)
        return found[0]

    def prints(self, text: str) -> None:
        wait_for(lambda: self.attempt.output.exists() and text in self.attempt.output.read_text(), text)

    def kill_guardian(self) -> subprocess.Popen[bytes]:
        killed = self.guarded.reaper
        assert isinstance(killed, subprocess.Popen)
        killed.kill()
        killed.wait()
        return killed

    def proceed(self) -> None:
        self.go.write_text("go")


WAITS = "import sys; print('here'); open(sys.argv[1]).read(); raise SystemExit(3)"
CLINGS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print('asked'))
print('here')
while True:
    signal.pause()
"""


def left_of(said: list[dict[str, Any]]) -> object:
    (ended,) = (one for one in said if one["event"] == "ended")
    return ended["left"]


@pytest.fixture
def launched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launched]:
    made = Launched(tmp_path, request.param)
    yield made
    assert left_of(made.guarded.end(0.0)) == []
    assert not made.guarded.probe_dir.exists()


@pytest.mark.parametrize("launched", [WAITS], indirect=True)
def test_a_run_goes_on_under_another_guardian_and_ends_as_it_would_have(launched: Launched) -> None:
    launcher = launched.hear("started")["pid"]
    launched.prints("here")
    killed = launched.kill_guardian()
    launched.guarded.events(PATIENCE_S)
    assert launched.guarded.reaper is not killed
    assert process_identity(launcher) is not None
    launched.proceed()
    left = launched.hear("exit")
    assert (left["pid"], left["status"], launched.guarded.is_lost) == (launcher, 3, False)
    assert left_of(launched.guarded.end(0.1)) == []
    (exit_,) = Journals(attempt=launched.attempt).exits()
    assert (exit_.pid, exit_.status, exit_.during_teardown) == (launcher, 3, False)


@pytest.mark.parametrize("launched", [WAITS], indirect=True)
def test_a_launch_whose_guardian_was_killed_before_it_began_begins_anew(launched: Launched) -> None:
    launched.kill_guardian()
    launched.hear("started")
    launched.proceed()
    assert launched.hear("exit")["status"] == 3


@pytest.mark.parametrize("launched", [CLINGS], indirect=True)
def test_a_guardian_that_is_killed_while_it_ends_the_run_is_followed_by_one_that_does(launched: Launched) -> None:
    launcher = launched.hear("started")["pid"]
    launched.prints("here")
    said: list[dict[str, Any]] = []
    ending = threading.Thread(target=lambda: said.extend(launched.guarded.end(5.0)))
    ending.start()
    launched.prints("asked")
    launched.kill_guardian()
    ending.join(PATIENCE_S)
    assert left_of(said) == []
    found = process_identity(launcher)
    assert found is None or not found.is_alive()


@pytest.mark.parametrize("launched", [WAITS], indirect=True)
def test_a_guardian_that_was_stopped_is_continued(launched: Launched) -> None:
    guardian = launched.hear("started")["guardian"]
    launched.prints("here")
    os.kill(guardian, signal.SIGSTOP)
    launched.proceed()
    assert launched.hear("exit")["status"] == 3
    os.kill(guardian, signal.SIGSTOP)
    assert left_of(launched.guarded.end(0.1)) == []
    assert (launched.guarded.replacements, process_identity(guardian)) == (0, None)


class Stuck:
    """A guardian that has said all it had to say, and does not get the time to leave."""

    def __init__(self, said: bytes) -> None:
        ear, mouth = os.pipe()
        os.write(mouth, said)
        self.stdout, self.kept = os.fdopen(ear, "rb", buffering=0), mouth
        self.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb")

    def wait(self, timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("guardian", timeout or 0.0)


def test_a_guardian_that_leaves_late_costs_a_run_that_has_ended_nothing(tmp_path: Path) -> None:
    reaper = Stuck(b'{"event": "ended", "t_ns": 1, "outlived": [], "left": []}\n')
    guarded = LaunchedRun(reaper=reaper, origin_ns=0, probe_dir=tmp_path, tag="t", order={}, has_probe=False)
    assert [one["event"] for one in guarded.end(0.0)] == ["ended"]
    os.close(reaper.kept)


@pytest.mark.parametrize("launched", [WAITS], indirect=True)
def test_a_rank_that_is_known_is_watched_by_the_next_guardian_too(launched: Launched) -> None:
    launched.hear("started")
    launched.prints("here")
    child = subprocess.Popen([sys.executable, "-I", "-S", "-u", "-c", WAITS, str(launched.go)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    launched.guarded.send_command(do="watch", pid=child.pid, rank=1)
    launched.kill_guardian()
    launched.guarded.events(PATIENCE_S)
    os.kill(child.pid, signal.SIGKILL)
    left = launched.hear("exit")
    assert (left["pid"], left["rank"], left["status"]) == (child.pid, 1, -signal.SIGKILL)
    child.wait()
    assert launched.guarded.watch_commands == {}
