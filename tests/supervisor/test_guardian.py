"""The guardian, with real processes: it leaves nothing behind, whatever the run or the controller does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from living import wait_for

from nsa_harness import protocol
from nsa_harness.supervisor.launch import reaper as program
from nsa_harness.supervisor.storage.safe_directory import DOCUMENTS_BYTES

PYTHON = [sys.executable, "-I", "-S", "-c"]
# As the harness starts it: with the standard library only, wherever the package lies.
REAPER = [
    *PYTHON,
    f"import sys; sys.path.append({str(Path(program.__file__).parents[3])!r});"
    f" from {program.__name__} import main; main()",
]
PATIENCE_S = 20.0
PROMPT = 5_000_000_000  # nanoseconds from the first signal to the end of everything

# Every process of a run says its pid on a pipe when it is what it is meant to be.
PRELUDE = """
import os, signal, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)
def ready():
    os.write(pipe, b"%d\\n" % os.getpid())
def child(act):
    if os.fork() == 0:
        act()
        ready()
        while True:
            signal.pause()
"""
IDLE = PRELUDE + "ready()\nsignal.pause()\n"


class Controller:
    """Speaks to one guardian, as the harness does."""

    def __init__(self, home: Path, tag: str, argv: list[str] | None, under: Sequence[str] = (), **order: Any) -> None:
        self.order = self.order_of(home, tag, argv) | order
        self.process = subprocess.Popen([*under, *REAPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pending = b""
        self.said: list[dict[str, Any]] = []
        self.send(self.order)

    @staticmethod
    def order_of(home: Path, tag: str, argv: list[str] | None) -> dict[str, Any]:
        boards = home / "boards-in-memory"
        boards.mkdir(exist_ok=True)
        return {
            "argv": argv,
            "env": {**os.environ, protocol.ENV_RUN: tag},
            "cwd": None,
            "umask": -1,
            "tag": tag,
            "output": str(home / "output.log"),
            "boards": str(boards),
            "keep": str(home / "boards"),
            "journal": str(home / "processes.jsonl"),
            "interrupted": str(home / "interrupted"),
        }

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, event: str) -> dict[str, Any]:
        """The next event of that kind."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = next((one for one in self.said if one["event"] == event), None)
            if found is not None:
                self.said.remove(found)
                return found
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the guardian never said {event!r}, only {self.said}"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"the guardian left without saying {event!r}"
            *lines, self.pending = (self.pending + chunk).split(b"\n")
            self.said += [json.loads(line) for line in lines]

    def die(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Home:
    """A directory for one run, the pipe its processes report on, and what is left to clean up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = f"test-{secrets.token_hex(6)}"
        self.fifo = path / "ready"
        os.mkfifo(self.fifo)
        self.read_end = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.keep_open = os.open(self.fifo, os.O_WRONLY)  # no end of file between two writers
        self.controllers: list[Controller] = []
        self.pids: list[int] = []
        self.heard = b""

    def run(self, source: str, under: Sequence[str] = (), **order: Any) -> Controller:
        return self.guard([*PYTHON, source, str(self.fifo)], under, **order)

    def guard(self, argv: list[str] | None, under: Sequence[str] = (), **order: Any) -> Controller:
        controller = Controller(self.path, self.tag, argv, under, **order)
        self.controllers.append(controller)
        return controller

    def wait_ready(self, count: int) -> list[int]:
        """The pids of `count` processes that are in their places."""
        while self.heard.count(b"\n") < count:
            ready, _, _ = select.select([self.read_end], [], [], PATIENCE_S)
            assert ready, f"only {self.heard!r} of {count} processes came up"
            self.heard += os.read(self.read_end, 4096)
        found = [int(line) for line in self.heard.split()]
        self.heard = b""
        self.pids += found
        return found

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "processes.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for controller in self.controllers:
            controller.process.kill()
            controller.process.wait()
        # The launcher of a test that ended nothing is nobody's child any more; it reports on our pipe.
        self.pids += [process.pid for process in psutil.process_iter() if str(self.fifo) in _words(process)]
        for pid in filter(lives, self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self.read_end)
        os.close(self.keep_open)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def lives(pid: int) -> bool:
    stat = program._stat(pid)
    return stat is not None and stat[0] not in "ZX"


def end_promptly(home: Home, controller: Controller, grace_s: float = 0.3) -> dict[str, Any]:
    controller.send({"do": "end", "grace_s": grace_s})
    ended = controller.hear("ended")
    first = next(one for one in home.journal() if one["event"] == "signal")
    assert ended["t_ns"] - first["t_ns"] < PROMPT
    assert ended["left"] == []
    return ended


def test_it_starts_the_launcher_in_its_own_session_with_the_tag_and_says_so(home: Home) -> None:
    controller = home.run(IDLE)
    started = controller.hear("started")
    (pid,) = home.wait_ready(1)
    assert (started["pid"], started["guardian"]) == (pid, controller.process.pid)
    assert os.getsid(pid) == pid
    assert f"{protocol.ENV_RUN}={home.tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    ("source", "status"),
    [("raise SystemExit(3)", 3), ("pass", 0), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_it_reports_how_the_launcher_ended(home: Home, source: str, status: int) -> None:
    controller = home.guard([*PYTHON, source])
    started, left = controller.hear("started"), controller.hear("exit")
    assert (left["pid"], left["rank"], left["status"]) == (started["pid"], None, status)
    assert left["t_ns"] >= started["t_ns"]
    assert [one["event"] for one in home.journal()] == ["started", "exit"]


def test_what_the_run_prints_goes_to_the_output_file_and_signals_keep_their_meaning(home: Home) -> None:
    source = "import signal; print('TERM' if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 'ignored')"
    home.guard([*PYTHON, source]).hear("exit")
    assert (home.path / "output.log").read_text() == "TERM\n"


def test_a_launcher_that_cannot_start_is_told_as_failed(home: Home) -> None:
    controller = home.guard([str(home.path / "no-such-launcher")])
    assert "no-such-launcher" in controller.hear("failed")["error"]
    controller.send({"do": "end", "grace_s": 1.0})
    ended = controller.hear("ended")
    assert (ended["outlived"], ended["left"]) == ([], [])
    controller.send({"do": "quit"})
    assert controller.process.wait(PATIENCE_S) == 0


RANK = (
    PRELUDE
    + """
def leave():
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
child(leave)
signal.pause()
"""
)


def test_the_exit_code_of_a_watched_rank_is_told(home: Home) -> None:
    controller = home.run(RANK)
    (rank,) = home.wait_ready(1)
    controller.send({"do": "watch", "pid": rank, "rank": 5})
    os.kill(rank, signal.SIGUSR1)
    left = controller.hear("exit")
    assert (left["pid"], left["rank"], left["status"]) == (rank, 5, 7)


def test_a_watched_rank_that_was_killed_is_told_with_its_signal(home: Home) -> None:
    controller = home.run(RANK)
    (rank,) = home.wait_ready(1)
    controller.send({"do": "watch", "pid": rank, "rank": 0})
    os.kill(rank, signal.SIGKILL)
    assert controller.hear("exit")["status"] == -9


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_end_of_a_process_that_somebody_else_has_reaped_is_told_where_the_kernel_knows_it(
    command: str, status: int
) -> None:
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    process.communicate(b"\n")
    major, minor = map(int, re.findall(r"\d+", platform.release())[:2])
    assert program._exit_status(process.pid, descriptor) == (status if (major, minor) >= (6, 15) else None)
    os.close(descriptor)


def test_a_rank_that_had_left_before_it_was_watched_has_an_unknown_end(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    gone = subprocess.Popen([*PYTHON, "pass"])
    gone.wait()
    controller.send({"do": "watch", "pid": gone.pid, "rank": 1})
    left = controller.hear("exit")
    assert (left["pid"], left["rank"], left["status"]) == (gone.pid, 1, None)


# Nothing survives the end.

NASTY: dict[str, tuple[str, int]] = {
    "a grandchild in a session of its own, its parent gone": (
        """
if os.fork() == 0:
    os.setsid()
    child(lambda: None)
    os._exit(0)
""",
        1,
    ),
    "a process that ignores SIGTERM": ("child(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))", 1),
    "a stopped process": (
        """
def stop():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
pid = os.fork()
if pid == 0:
    stop()
    signal.pause()
os.waitpid(pid, os.WUNTRACED)
""",
        1,
    ),
    "a stopped process that ignores SIGTERM": (
        """
pid = os.fork()
if pid == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
os.waitpid(pid, os.WUNTRACED)
""",
        1,
    ),
    "twenty sleepers": ("for _ in range(20):\n    child(lambda: None)", 20),
    "a child that answers SIGTERM with another child": (
        """
def again(*_):
    if os.fork() == 0:
        ready()
        while True:
            signal.pause()
child(lambda: signal.signal(signal.SIGTERM, again))
""",
        1,
    ),
    "an orphan that dropped its environment": (
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ready()
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
""",
        1,
    ),
}


LATER_ALONE = (
    PRELUDE
    + """
if os.fork() == 0:
    os.setsid()
    ready()
    os.execve("/bin/sleep", ["sleep", "600"], {})
ready()
signal.pause()
"""
)


def written_down(controller: Controller) -> list[int]:
    """Whom the guardian would have another one know that takes its place."""
    owner = Path(controller.order["boards"]) / program.OWNER
    return [pid for pid, _ in json.loads(owner.read_text())["order"].get("known", [])]


@pytest.mark.parametrize("what", NASTY)
def test_within_five_seconds_nothing_is_left_of(home: Home, what: str) -> None:
    source, count = NASTY[what]
    controller = home.run(PRELUDE + source + "\nready()\nsignal.pause()\n")
    pids = home.wait_ready(count + 1)
    assert all(map(lives, pids))
    end_promptly(home, controller)
    assert not any(map(lives, pids))


def test_a_process_outside_the_run_is_left_alone(home: Home) -> None:
    with subprocess.Popen([*PYTHON, IDLE, str(home.fifo)]) as bystander:
        (outside,) = home.wait_ready(1)
        controller = home.run(IDLE)
        (inside,) = home.wait_ready(1)
        end_promptly(home, controller)
        assert (lives(inside), lives(outside)) == (False, True)
        bystander.kill()


def test_processes_that_outlive_their_launcher_are_named(home: Home) -> None:
    controller = home.run(PRELUDE + "child(lambda: None)\n")
    (orphan,) = home.wait_ready(1)
    controller.hear("exit")
    ended = end_promptly(home, controller)
    assert [one.split()[0] for one in ended["outlived"]] == [str(orphan)]


def test_while_the_launcher_lives_its_processes_are_not_orphans(home: Home) -> None:
    controller = home.run(PRELUDE + "child(lambda: None)\nready()\nsignal.pause()\n")
    home.wait_ready(2)
    assert end_promptly(home, controller)["outlived"] == []


def test_a_process_gets_its_grace_before_it_is_killed(home: Home) -> None:
    source = """
def goodbye(*_):
    ready()
    os._exit(0)
signal.signal(signal.SIGTERM, goodbye)
ready()
signal.pause()
"""
    controller = home.run(PRELUDE + source)
    home.wait_ready(1)
    end_promptly(home, controller, grace_s=10.0)
    home.wait_ready(1)
    assert [one["signal"] for one in home.journal() if one["event"] == "signal"] == ["SIGTERM"]


# Boards and journal.


def test_the_boards_come_home_and_their_directory_in_memory_is_removed(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    boards = Path(controller.order["boards"])
    (boards / "7.board").write_bytes(b"board")
    end_promptly(home, controller)
    assert not boards.exists()
    assert (home.path / "boards" / "7.board").read_bytes() == b"board"


def test_a_file_that_its_rank_renames_while_it_is_copied_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(program.Reaper, "report", lambda _, event, **__: said.append(event))
    order = Controller.order_of(tmp_path, "renamed", None) | {"boards": str(tmp_path / "memory")}
    (tmp_path / "memory").mkdir()
    listed = [tmp_path / "memory" / "7.flight.json", tmp_path / "memory" / "7.flight.json.8.new"]
    listed[0].write_text("{}")
    monkeypatch.setattr(program, "_probe_files", lambda _: listed)
    assert program.Reaper(order).copy_probe_files()
    assert (said, [path.name for path in Path(order["keep"]).iterdir()]) == ([], ["7.flight.json"])


def test_boards_that_cannot_be_brought_home_are_told_as_trouble(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    (home.path / "boards").write_text("a file where the directory should be")
    board = Path(controller.order["boards"]) / "7.board"
    board.write_bytes(b"board")
    controller.send({"do": "end", "grace_s": 0.3})
    trouble = controller.hear("trouble")
    assert (trouble["what"], trouble["why"]) == (
        "probe files",
        f"7.board: Not a directory; files that could not be copied are in {board.parent}",
    )
    assert controller.hear("ended")["left"] == []
    assert board.read_bytes() == b"board", "the only one there is"


def test_boards_that_stayed_are_brought_home_by_the_next_guardian_which_touches_nothing_else(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    (home.path / "boards").write_text("a file where the directory should be")
    (Path(controller.order["boards"]) / "7.board").write_bytes(b"board")
    end_promptly(home, controller)
    controller.hear("exit")  # the last that it has to tell
    owner = json.loads((Path(controller.order["boards"]) / program.OWNER).read_text())
    (home.path / "boards").unlink()
    before = home.journal()
    home.guard(None, **{name: said for name, said in owner["order"].items() if name not in ("argv", "tag")}).die()
    home.controllers[-1].process.wait(PATIENCE_S)
    assert (home.path / "boards" / "7.board").read_bytes() == b"board"
    assert not Path(controller.order["boards"]).exists()
    assert (home.journal(), (home.path / "interrupted").exists()) == (before, False)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("place", ["a link", "another folder", "nothing"])
def test_nothing_is_written_where_the_attempt_no_longer_lies(tmp_path: Path, place: str, dies: bool) -> None:
    attempt, scratch = tmp_path / "run" / "attempt", tmp_path / "scratch"
    attempt.mkdir(parents=True)
    home = Home(attempt)
    try:
        controller = home.run(IDLE, boards=str(tmp_path / "memory"))
        (pid,) = home.wait_ready(1)
        (tmp_path / "memory" / "7.board").write_bytes(b"board")
        attempt.rename(scratch)
        if place == "a link":
            attempt.symlink_to(scratch)
        elif place == "another folder":
            attempt.mkdir()
        before = {path.name for path in scratch.iterdir()}
        if dies:
            controller.die()
        else:
            controller.send({"do": "end", "grace_s": 0.3})
            assert "7.board" in controller.hear("trouble")["why"]
            assert controller.hear("ended")["left"] == []
            controller.send({"do": "quit"})
        assert controller.process.wait(PATIENCE_S) == 0
        assert not lives(pid)
        assert {path.name for path in scratch.iterdir()} == before
        assert place != "another folder" or list(attempt.iterdir()) == []
        assert not (tmp_path / "memory").exists(), "nobody could ever bring the boards home"
    finally:
        home.close()


def test_everything_it_says_is_also_in_the_journal(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    said = [controller.hear("started")]
    controller.send({"do": "end", "grace_s": 0.3})
    said.append(controller.hear("ended"))
    controller.send({"do": "quit"})
    controller.process.wait(PATIENCE_S)
    assert [one for one in home.journal() if one["event"] in ("started", "ended")] == said
    assert not (home.path / "interrupted").exists()


# A dead controller, and a dead guardian.


def test_when_the_controller_dies_the_run_is_ended_and_called_interrupted(home: Home) -> None:
    controller = home.run(PRELUDE + NASTY["a process that ignores SIGTERM"][0] + "\nready()\nsignal.pause()\n")
    pids = home.wait_ready(2)
    boards = Path(controller.order["boards"])
    (boards / "7.board").write_bytes(b"board")
    controller.die()
    assert controller.process.wait(PATIENCE_S) == 0
    assert not any(map(lives, pids))
    assert (home.path / "interrupted").read_text() == "nsa-harness was killed; its reaper process ended the run\n"
    assert (home.path / "boards" / "7.board").read_bytes() == b"board"
    assert not boards.exists()
    events = [one["event"] for one in home.journal()]
    assert (events[0], events[1]) == ("started", "abandoned")
    assert "ended" in events


def test_a_controller_that_dies_before_its_order_starts_nothing() -> None:
    with subprocess.Popen(REAPER, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as alone:
        assert alone.stderr is not None
        assert alone.stderr.read().decode().strip() == "the controller exited before it sent its order"
    assert alone.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_meant_for_the_job_does_not_end_the_guardian(home: Home, number: signal.Signals) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    controller.process.send_signal(number)
    end_promptly(home, controller)


def test_after_its_guardian_was_killed_another_one_sweeps_by_the_tag(home: Home) -> None:
    first = home.run(PRELUDE + "child(os.setsid)\nready()\nsignal.pause()\n")
    pids = home.wait_ready(2)
    first.process.kill()
    first.process.wait()
    assert all(map(lives, pids)), "the run outlives its guardian"
    second = home.guard(None)
    end_promptly(home, second)
    assert not any(map(lives, pids))
    second.send({"do": "quit"})
    assert second.process.wait(PATIENCE_S) == 0


def test_an_orphan_without_the_tag_is_known_to_whoever_takes_the_place_of_a_killed_guardian(home: Home) -> None:
    first = home.run(PRELUDE + NASTY["an orphan that dropped its environment"][0] + "ready()\nsignal.pause()\n")
    pids = home.wait_ready(2)
    (orphan,) = set(pids) - {first.hear("started")["pid"]}
    wait_for(lambda: orphan in written_down(first), "it is written down")
    first.process.kill()
    first.process.wait()
    second = home.guard(None)
    end_promptly(home, second)
    assert not any(map(lives, pids))


def test_what_loses_parents_and_tag_under_a_guardian_that_took_over_is_not_lost(home: Home) -> None:
    first = home.run(LATER_ALONE)
    launcher = first.hear("started")["pid"]
    (child,) = set(home.wait_ready(2)) - {launcher}
    known = program.process_identity(launcher)
    assert known is not None
    first.process.kill()
    first.process.wait()
    second = home.guard(None, launcher=[known.pid, known.start_ticks])
    wait_for(lambda: child in written_down(second), "it is written down")
    os.kill(launcher, signal.SIGKILL)
    second.hear("exit")
    end_promptly(home, second)
    assert not lives(child)


def test_a_second_end_finds_nothing_left_to_do(home: Home) -> None:
    controller = home.run(IDLE)
    home.wait_ready(1)
    controller.send({"do": "end", "grace_s": 0.3})
    controller.hear("ended")
    controller.send({"do": "end", "grace_s": 0.3})
    again = controller.hear("ended")
    assert (again["outlived"], again["left"]) == ([], [])
    assert [one["signal"] for one in home.journal() if one["event"] == "signal"] == ["SIGTERM"]


def test_the_exit_code_of_a_command_that_ends_at_once_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []

    def say(_: object, event: str, **facts: Any) -> None:
        said.append({"event": event, **facts})
        if event == "started":  # the command has ended before its guardian looks again
            os.waitid(os.P_PID, facts["pid"], os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(program.Reaper, "report", say)
    monkeypatch.setattr(program.Reaper, "record", say)
    order = Controller.order_of(tmp_path, "quick", ["sh", "-c", "exit 3"])
    reaper = program.Reaper(order)
    reaper.start()
    reaper._reap()
    # It reaps whatever this process has for children, those of other tests too.
    own = [one for one in said if one["pid"] == said[0]["pid"]]
    assert [(one["event"], one.get("status")) for one in own] == [("started", None), ("exit", 3)]


def test_a_program_has_the_umask_of_the_user_and_not_ours(home: Home) -> None:
    order = Controller.order_of(home.path, home.tag, ["/bin/sh", "-c", "umask"])
    reaper = program.Reaper({**order, "umask": 0o027})
    reaper.spawn()
    assert reaper.child is not None
    assert reaper.child.wait(PATIENCE_S) == 0
    assert (home.path / "output.log").read_text() == "0027\n"


# What may not be signalled, and what cannot be written.

FOREIGN = """
def foreign():
    open("/proc/self/comm", "w").write("foreign")
    if sys.argv[2] == "root":
        os.setuid(65534)
child(foreign)
child(lambda: None)
"""
# In place of the kernel, for whoever may start no process of somebody else's: a guardian whose signals are refused.
REFUSED = """
import os, signal, sys
send = signal.pidfd_send_signal
def refused(descriptor, number):
    pid = next(line.split()[1] for line in open(f"/proc/self/fdinfo/{descriptor}") if line.startswith("Pid:"))
    if open(f"/proc/{pid}/comm").read() == "foreign\\n":
        raise PermissionError(1, "Operation not permitted")
    send(descriptor, number)
signal.pidfd_send_signal = refused
exec(sys.argv[-1])
"""
UNDER = {"root": ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill"], "refused": [*PYTHON, REFUSED]}
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of somebody else's")


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("way", ["refused", pytest.param("root", marks=NEEDS_ROOT)])
def test_a_process_that_may_not_be_signalled_is_named_and_the_others_are_ended(
    home: Home, way: str, dies: bool
) -> None:
    launcher = [*PYTHON, PRELUDE + FOREIGN + "ready()\nsignal.pause()\n", str(home.fifo), way]
    controller = home.guard(launcher, UNDER[way])
    pids = home.wait_ready(3)
    (foreign,) = (pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "foreign\n")
    assert (os.stat(f"/proc/{foreign}").st_uid == 65534) == (way == "root")
    board = Path(controller.order["boards"]) / "7.board"
    board.write_bytes(b"board")
    if dies:
        controller.die()
    else:
        controller.send({"do": "end", "grace_s": 0.3})
    (survivor,) = controller.hear("ended")["left"]
    assert [pid for pid in pids if lives(pid)] == [foreign]
    assert survivor == (
        f"{foreign} {program.command_of(foreign)} (of {program.user_of(foreign)}; may not be signalled,"
        " Operation not permitted)"
    )
    assert (home.path / "boards" / "7.board").read_bytes() == b"board"
    if dies:
        assert controller.process.wait(PATIENCE_S) == 0
        said = (home.path / "interrupted").read_text()
        assert said == f"nsa-harness was killed; its reaper process could not end all of its processes: {survivor}\n"


def test_no_signal_goes_to_another_process_that_has_the_number_by_now(home: Home) -> None:
    with subprocess.Popen([*PYTHON, IDLE, str(home.fifo)]) as bystander:
        (pid,) = home.wait_ready(1)
        known = program.process_identity(pid)
        assert known is not None
        before = program.ProcessIdentity(pid, known.start_ticks - 1)
        assert (before.send_signal(signal.SIGKILL), before.is_alive(), known.is_alive()) == (None, False, True)
        assert known.send_signal(signal.SIGKILL) is None
        assert bystander.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_process_that_is_gone_may_be_signalled() -> None:
    gone = subprocess.Popen([*PYTHON, "pass"])
    known = program.process_identity(gone.pid)
    gone.wait()
    assert known is not None
    assert known.send_signal(signal.SIGKILL) is None


def test_a_journal_that_cannot_be_written_does_not_keep_a_dead_controllers_run_alive(home: Home) -> None:
    controller = home.run(IDLE, journal="/dev/full")
    pids = home.wait_ready(1)
    (Path(controller.order["boards"]) / "7.board").write_bytes(b"board")
    controller.die()
    assert controller.process.wait(PATIENCE_S) == 0
    assert not any(map(lives, pids))
    assert (home.path / "boards" / "7.board").read_bytes() == b"board"
    assert (home.path / "interrupted").read_text() == "nsa-harness was killed; its reaper process ended the run\n"


class Disk:
    """That of a run: full for whoever writes to it, until its reserve is given up."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.reserve = home / ".reserve"
        self.reserve.write_bytes(bytes(2 * DOCUMENTS_BYTES))
        self.open = os.open

    def __call__(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        folder = Path(f"/proc/self/fd/{named['dir_fd']}").readlink() if "dir_fd" in named else Path(path).parent
        is_full = self.reserve.stat().st_size > DOCUMENTS_BYTES
        if flags & os.O_CREAT and folder.is_relative_to(self.home) and is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self.open(path, flags, *rest, **named)


def test_on_a_full_disk_the_reserve_gives_room_for_journal_and_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    order = Controller.order_of(run, "full", None) | {
        "boards": str(tmp_path / "memory"),
        "reserve": str(run / ".reserve"),
    }
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "7.board").write_bytes(b"board")
    disk = Disk(run)
    monkeypatch.setattr(os, "open", disk)
    monkeypatch.setattr(os, "write", lambda one, data, write=os.write: len(data) if one == 1 else write(one, data))
    reaper = program.Reaper(order)
    reaper.move_probe_files()
    reaper.report("ended", outlived=[], left=[])
    said = [json.loads(line) for line in (run / "processes.jsonl").read_text().splitlines()]
    assert [one["event"] for one in said] == ["full", "ended"]
    assert said[0]["why"] == f"No space left on device: {run / 'boards' / '7.board'}"
    assert (run / "boards" / "7.board").read_bytes() == b"board"
    assert disk.reserve.stat().st_size == DOCUMENTS_BYTES, "what is left is for the documents"
    assert not (tmp_path / "memory").exists()


def test_a_reserve_that_somebody_else_needed_tells_that_the_disk_was_full(home: Home) -> None:
    (home.path / ".reserve").write_bytes(b"")
    controller = home.run(IDLE, reserve=str(home.path / ".reserve"))
    home.wait_ready(1)
    end_promptly(home, controller)
    (full,) = (one for one in home.journal() if one["event"] == "full")
    assert full["why"] == f"the disk space reserved for the end of the run has been used: {home.path}"
