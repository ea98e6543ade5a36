"""Who ends a run whose controller and guardian were killed together: the keeper, else the next start."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from living import wait_for

from nsa_harness import protocol
from nsa_harness.supervisor.capture.procfs import is_alive
from nsa_harness.supervisor.launch import watchdog
from nsa_harness.supervisor.launch.reaper import OWNER, ProcessIdentity, process_identity, this_machine
from nsa_harness.supervisor.launch.watchdog import Owner, end_orphaned_runs, read_owner, start_program

PATIENCE_S = 30.0
PACKAGE = Path(watchdog.__file__).parents[2]

# A controller with one run, whose only process ignores TERM and hangs. It says who is who, and goes nowhere.
CONTROLLER = """
import json, os, signal, sys
from pathlib import Path
from nsa_harness.supervisor.launch.reaper import process_identity
from nsa_harness.supervisor.launch.watchdog import Watchdog, start_reaper
home, tag, keeps = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "keeps"
hangs = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('hangs', flush=True); signal.pause()"
me = process_identity(os.getpid())
order = {
    "argv": [sys.executable, "-c", hangs], "env": {**os.environ, "_NSA_HARNESS_RUN": tag}, "cwd": None, "umask": -1,
    "tag": tag, "output": str(home / "output.log"), "boards": str(home / f"nsa-harness-{tag}"),
    "keep": str(home / "boards"), "journal": str(home / "processes.jsonl"), "interrupted": str(home / "interrupted"),
    "reserve": str(home / ".reserve"), "controller": [me.pid, me.start_ticks],
}
watchdog = Watchdog()
if keeps:
    order["keeper"] = watchdog.guard(Path(order["boards"]))
reaper = start_reaper(order)
started = json.loads(reaper.stdout.readline())
kept = watchdog._process.pid if keeps else 0
print(json.dumps({"guardian": reaper.pid, "keeper": kept, "rank": started["pid"]}), flush=True)
signal.pause()
"""


class Run:
    """One run of that controller."""

    def __init__(self, home: Path, *, keeps: bool) -> None:
        self.home = home
        self.tag = f"test-{os.urandom(6).hex()}"
        self.boards = home / f"nsa-harness-{self.tag}"
        self.controller = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(home), self.tag, "keeps" if keeps else "alone"],
            stdout=subprocess.PIPE,
        )
        assert self.controller.stdout is not None
        pids = json.loads(self.controller.stdout.readline())
        self.reaper, self.watchdog_process, self.rank = pids["guardian"], pids["keeper"], pids["rank"]
        self.ended = os.pidfd_open(self.rank)
        wait_for(lambda: "hangs" in (home / "output.log").read_text(), "the rank hangs")
        (self.boards / "7.board").write_bytes(b"board")

    def kill(self, *pids: int) -> None:
        """All at once, as `pkill` does."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:  # a signal that was sent has not yet ended anybody
            wait_for(lambda pid=pid: not is_alive(pid), f"{pid} has ended")
        if self.controller.pid in pids:
            self.controller.wait(PATIENCE_S)

    def rank_lives(self) -> bool:
        return not select.select([self.ended], [], [], 0)[0]

    def assert_ended(self) -> None:
        assert select.select([self.ended], [], [], PATIENCE_S)[0], "the rank lives on"
        wait_for(lambda: not self.boards.exists(), "the boards are cleared")
        assert (self.home / "boards" / "7.board").read_bytes() == b"board"
        wait_for((self.home / "interrupted").exists, "the end is told")
        said = [json.loads(line) for line in (self.home / "processes.jsonl").read_text().splitlines()]
        assert [one["event"] for one in said if one["event"] in ("abandoned", "ended")] == ["abandoned", "ended"]
        assert said[-1]["left"] == []

    def close(self) -> None:
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(protocol.ENV_RUN) == self.tag or self.tag in process.cmdline()
            except psutil.Error:
                continue
            if ours:
                process.kill()
        self.controller.kill()
        self.controller.wait()
        if self.watchdog_process and is_alive(self.watchdog_process):  # stopped by a test that failed
            os.kill(self.watchdog_process, signal.SIGCONT)
        os.close(self.ended)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, keeps=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("run", [True], indirect=True)
def test_a_run_whose_controller_and_guardian_are_killed_together_is_ended_by_the_keeper(run: Run) -> None:
    run.kill(run.controller.pid, run.reaper)
    run.assert_ended()
    wait_for(lambda: not is_alive(run.watchdog_process), "the keeper has nothing left to do")


@pytest.mark.parametrize("run", [True], indirect=True)
def test_a_keeper_leaves_to_a_living_guardian_what_is_its_own(run: Run) -> None:
    run.kill(run.controller.pid)
    run.assert_ended()


@pytest.mark.parametrize("run", [True], indirect=True)
def test_a_keeper_continues_a_guardian_that_was_stopped(run: Run) -> None:
    os.kill(run.reaper, signal.SIGSTOP)
    run.kill(run.controller.pid)
    run.assert_ended()
    wait_for(lambda: not is_alive(run.reaper) and not is_alive(run.watchdog_process), "neither of them stays")


@pytest.mark.parametrize("run", [True], indirect=True)
def test_the_next_start_continues_a_guardian_that_was_stopped_with_its_keeper(run: Run) -> None:
    os.kill(run.watchdog_process, signal.SIGSTOP)
    os.kill(run.reaper, signal.SIGSTOP)
    stopped = lambda: psutil.Process(run.reaper).status() == psutil.STATUS_STOPPED  # noqa: E731
    wait_for(stopped, "the guardian is stopped")
    end_orphaned_runs([run.boards])
    assert stopped(), "its controller lives, and continues it"
    run.kill(run.controller.pid)
    assert run.rank_lives()
    end_orphaned_runs([run.boards])
    assert not run.boards.exists(), "the start has waited for it"
    run.assert_ended()
    wait_for(lambda: not is_alive(run.reaper) and not is_alive(run.watchdog_process), "neither of them stays")


@pytest.mark.parametrize("run", [False], indirect=True)
def test_boards_that_the_next_start_cannot_bring_home_either_are_removed(run: Run) -> None:
    (run.home / "boards").write_text("a file where the directory should be")
    run.kill(run.reaper)
    run.kill(run.controller.pid)
    end_orphaned_runs([run.boards])
    assert not run.rank_lives()
    assert not run.boards.exists()
    said = [json.loads(line) for line in (run.home / "processes.jsonl").read_text().splitlines()]
    (trouble,) = (one["why"] for one in said if one["event"] == "trouble")
    assert trouble == "7.board: Not a directory; files that could not be copied were removed"


@pytest.mark.parametrize("run", [True], indirect=True)
def test_who_guards_a_run_has_neither_our_name_nor_our_place_in_its_command_line(run: Run) -> None:
    for pid in (run.reaper, run.watchdog_process):
        words = " ".join(psutil.Process(pid).cmdline())
        assert "nsa-harness" not in words
        assert str(PACKAGE) not in words
        assert str(PACKAGE.resolve().parent) not in words


@pytest.mark.parametrize("run", [False], indirect=True)
def test_the_next_start_ends_what_was_killed_with_all_its_guards(run: Run) -> None:
    end_orphaned_runs([run.boards])
    assert run.rank_lives(), "its controller and its guardian live"
    run.kill(run.reaper)
    end_orphaned_runs([run.boards])
    assert run.rank_lives(), "its controller lives, and will replace the guardian"
    run.kill(run.controller.pid)
    assert run.rank_lives()
    end_orphaned_runs([run.boards])
    run.assert_ended()


def test_an_owner_whose_number_another_process_has_by_now_is_dead() -> None:
    me = process_identity(os.getpid())
    assert me is not None
    earlier = ProcessIdentity(me.pid, me.start_ticks - 1)
    assert Owner(controller=earlier, reaper=earlier, module="", order={}).is_dead()
    assert not Owner(controller=earlier, reaper=me, module="", order={}).is_dead()


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "{}",
        json.dumps(
            {"machine": ["another boot", "pid:[1]"], "controller": None, "guardian": None, "module": "m", "order": {}}
        ),
        json.dumps({"machine": this_machine(), "controller": [1], "guardian": None, "module": "m", "order": {}}),
    ],
)
def test_boards_of_an_owner_that_cannot_be_known_are_left_alone(tmp_path: Path, said: str) -> None:
    boards = tmp_path / "nsa-harness-x"
    boards.mkdir()
    (boards / OWNER).write_text(said)
    assert read_owner(boards) is None
    end_orphaned_runs([boards])
    assert (boards / OWNER).exists()


def test_boards_behind_a_link_are_nobodys(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    said = {"machine": this_machine(), "controller": None, "guardian": None, "module": "m", "order": {}}
    (tmp_path / "elsewhere" / OWNER).write_text(json.dumps(said))
    assert read_owner(tmp_path / "elsewhere") is not None
    (tmp_path / "nsa-harness-x").symlink_to("elsewhere")
    assert read_owner(tmp_path / "nsa-harness-x") is None


def test_an_empty_directory_of_boards_is_removed_once_nobody_can_be_about_to_own_it(tmp_path: Path) -> None:
    young, old = tmp_path / "nsa-harness-young", tmp_path / "nsa-harness-old"
    for one in (young, old):
        one.mkdir()
    os.utime(old, (0, 0))
    end_orphaned_runs([young, old])
    assert (young.exists(), old.exists()) == (True, False)


def test_a_keeper_that_was_killed_is_replaced_with_all_it_knew(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    kept = watchdog.Watchdog()
    kept.guard(first)
    killed = kept._process
    assert killed is not None
    killed.kill()
    killed.wait()
    kept.guard(second)
    assert kept._process is not killed
    assert kept._probe_dirs == [first, second]
    assert kept._process is not None
    kept._process.communicate(timeout=PATIENCE_S)


def test_a_program_of_ours_is_found_wherever_it_is_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = start_program("nsa_harness.supervisor.launch.watchdog", "keeper")
    started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0


def test_boards_of_another_user_are_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write into a directory that all may write into could name processes and files of ours in it."""
    boards = tmp_path / "nsa-harness-x"
    boards.mkdir()
    me = process_identity(os.getpid())
    assert me is not None
    said = {
        "machine": this_machine(),
        "controller": [me.pid, me.start_ticks],
        "guardian": None,
        "module": "m",
        "order": {},
    }
    (boards / OWNER).write_text(json.dumps(said))
    assert read_owner(boards) == Owner(controller=me, reaper=None, module="m", order={})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_owner(boards) is None
