"""Jobs that somebody else started are found by what the kernel says of their processes, and how long they stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attempts import spec
from builders import board, mark
from living import program, wait_for

from nsa_harness import protocol
from nsa_harness.commands.watch import chosen_job
from nsa_harness.core.plan import Launcher
from nsa_harness.errors import NoSuchJob
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.observe import attach
from nsa_harness.supervisor.observe.attach import FoundJob, find_job, find_jobs, missing_ranks, only_job
from nsa_harness.supervisor.observe.ranks import ranks_below
from nsa_harness.supervisor.storage.rundir import create_run
from nsa_harness.supervisor.watch.ranks import Ranks

WAITS = "import signal; print(flush=True); signal.pause()"
NO_SCHEDULER = procfs.idle_s(os.getpid(), threading.get_native_id()) is None


@contextmanager
def ranks(count: int, port: int) -> Iterator[list[int]]:
    """Programs that a launcher has given a rank."""
    environment = {"MASTER_ADDR": "here", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    with ExitStack() as stack:
        started = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", WAITS],
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(count)
        ]
        for one in started:
            stack.enter_context(one)
            stack.callback(one.kill)
            assert one.stdout is not None
            one.stdout.readline()
        yield [one.pid for one in started]


STARTS = """
import mmap, os, signal, subprocess, sys
file, numbers = sys.argv[1], sys.argv[2].split(",")
held = mmap.mmap(os.open(file, os.O_RDONLY), 0, prot=mmap.PROT_READ)
for number in filter(None, numbers):
    environment = {**os.environ, "LOCAL_RANK": number} if number != "-" else os.environ
    subprocess.Popen([sys.executable, "-S", "-c", sys.orig_argv[3], file, ""], env=environment)
print(flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("numbers", "known"),
    [("1,2", [0, 1, 2]), ("0,1", [0, 1]), ("2", [0]), ("-", [0])],
    ids=["the first starts the others", "a launcher that trains too", "one is not there", "no number"],
)
def test_ranks_that_a_rank_has_started_are_known_by_their_local_rank(
    tmp_path: Path, numbers: str, known: list[int]
) -> None:
    """As Lightning starts a script again; what maps the library has loaded torch."""
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    command = [sys.executable, "-S", "-c", STARTS, str(library), numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as first:
        try:
            assert first.stdout is not None
            for _ in [first.pid, *filter(None, numbers.split(","))]:
                first.stdout.readline()  # each says when it has mapped it
            ranks = ranks_below(first.pid)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    assert sorted(ranks) == known
    if numbers != "0,1":
        assert ranks[0] == first.pid


def found(*pids: int) -> list[FoundJob]:
    return find_jobs([stat for pid in pids if (stat := procfs.read_stat(pid))])


def test_ranks_of_one_rendezvous_are_one_job_named_by_its_lowest_rank() -> None:
    with ranks(2, 4711) as first, ranks(1, 4712) as second:
        jobs = found(*reversed(first), *second)
    assert [(job.pid, job.ranks) for job in jobs] == [(first[0], 2), (second[0], 1)]
    assert jobs[0].text.startswith(f"{first[0]}   2 ranks   running for ")
    assert jobs[0].text.endswith(f"{Path(sys.executable).name} -S -c {WAITS}")


def test_what_has_no_rank_is_no_job_and_the_child_of_a_rank_is_no_rank() -> None:
    below = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'print(flush=True); input()'])"
    environment = {"RANK": "3", "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", below], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        family = [rank.pid, *(stat.pid for stat in procfs.descendants(rank.pid))]
        jobs = found(*family, os.getpid())
        rank.communicate(b"\n")
    assert len(family) == 2
    assert [(job.pid, job.ranks) for job in jobs] == [(rank.pid, 1)]


def test_the_only_job_is_taken_and_of_several_or_none_one_has_to_be_named() -> None:
    one = FoundJob(pid=11, command="torchrun train.py", ranks=2, age_s=200.0)
    other = FoundJob(pid=12, command="torchrun other.py", ranks=1, age_s=20.0)
    assert only_job([one]) == 11
    with pytest.raises(
        NoSuchJob, match=r"2 jobs run on this machine; name one of them, such as `nsa-harness attach 11`:"
    ) as several:
        only_job([one, other])
    assert str(several.value).splitlines()[1:] == [
        "  11   2 ranks   running for 3 min 20 s   torchrun train.py",
        "  12   1 rank   running for 20 s   torchrun other.py",
    ]
    with pytest.raises(NoSuchJob, match="no job of this user is running on this machine"):
        only_job([])


def test_of_several_jobs_the_one_that_is_named_when_asked_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [FoundJob(pid=pid, command="train.py", ranks=2, age_s=1.0) for pid in (11, 12)]
    monkeypatch.setattr("nsa_harness.commands.watch.jobs_of_this_user", lambda: jobs)
    asked: list[list[str]] = []
    assert chosen_job(lambda told: asked.append(list(told)) or 12) == 12
    assert asked == [[job.text for job in jobs]]
    with pytest.raises(NoSuchJob):
        chosen_job(lambda _: None)


def test_our_own_processes_are_searched_and_a_job_among_them_is_found() -> None:
    with ranks(1, 4713) as started:
        assert started[0] in [job.pid for job in attach.jobs_of_this_user()]


def test_a_shell_above_two_jobs_is_asked_which_one() -> None:
    with ranks(1, 4714) as first, ranks(1, 4715) as second, pytest.raises(NoSuchJob) as several:
        find_job(os.getpid())
    told = str(several.value)
    assert told.startswith("attach: 2 jobs run below process ")
    assert f"\n  {first[0]}   1 rank " in told
    assert f"\n  {second[0]}   1 rank " in told


@pytest.mark.skipif(NO_SCHEDULER, reason="this kernel does not say when a thread ran last")
def test_a_thread_that_waits_has_not_run_since_and_one_that_runs_just_has() -> None:
    with program(WAITS) as waiting:
        wait_for(lambda: (procfs.idle_s(waiting.pid, waiting.pid) or 0.0) > 0.2, "it has not run for a while")
        assert procfs.program_idle_s(waiting.pid) > 0.2
    own = procfs.idle_s(os.getpid(), threading.get_native_id())
    assert own is not None
    assert own < 0.2


def test_what_has_no_clock_of_the_scheduler_has_no_time_that_is_known() -> None:
    assert procfs.idle_s(2**22 + 1, 2**22 + 1) is None
    with program(WAITS) as waiting:
        processor = procfs.read_stat(waiting.pid).processor  # type: ignore[union-attr]
        assert procfs.idle_s(waiting.pid, waiting.pid, {processor: None}) is None


@pytest.mark.skipif(NO_SCHEDULER, reason="this kernel does not say when a thread ran last")
def test_a_job_that_is_found_as_it_stands_has_been_quiet_since_it_ran_last(tmp_path: Path) -> None:
    with program(WAITS) as waiting:
        wait_for(lambda: procfs.program_idle_s(waiting.pid) > 0.5, "it has not run for a while")
        sampler = StackSampler(origin_ns=0, probe_dir=tmp_path, dumps=tmp_path)
        seen = Ranks(spec=spec(), job=None, sampler=sampler, pids={0: waiting.pid})  # type: ignore[arg-type]
        seen.read_status_files(100.0)
        assert 0.0 < seen.last_progress_s() <= 99.5
        quiet_since_s = seen.last_progress_s()
        seen.read_status_files(101.0)
        assert seen.last_progress_s() == quiet_since_s


@pytest.mark.parametrize("launcher", [Launcher.PLAIN, Launcher.TORCHRUN])
def test_a_slow_launched_process_is_the_only_rank_if_it_is_not_torchrun(tmp_path: Path, launcher: Launcher) -> None:
    """The agent of torchrun may need longer than a rank to start, but never becomes a rank."""
    with program(WAITS) as waiting:
        job: Any = SimpleNamespace(
            origin_ns=0, probe_dir=tmp_path, has_probe=True, tag="t", send_command=lambda **_: None
        )
        sampler: Any = None
        found = Ranks(spec=spec(ranks=1, launcher=launcher), job=job, sampler=sampler).discover(waiting.pid)
    assert found == ([(0, waiting.pid)] if launcher is Launcher.PLAIN else [])


def test_a_status_file_that_is_gone_is_no_progress_of_its_rank() -> None:
    """Somebody ended the process that keeps the files; the rank itself has been standing all the time."""
    with program(WAITS) as waiting:
        found: list[Any] = [board(mark("step", at_s=7.0)), None, None]
        sampler: Any = SimpleNamespace(read_status_file=lambda *_: found.pop(0))
        seen = Ranks(spec=spec(), job=None, sampler=sampler, pids={0: waiting.pid})  # type: ignore[arg-type]
        times = []
        for now_s in (70.0, 71.0, 72.0):
            seen.read_status_files(now_s)
            times.append(seen.last_progress_s())
    assert times == [times[0]] * 3
    assert times[0] < 60.0


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, (1, 3)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ()),
        ({"WORLD_SIZE": "4"}, ()),
        ({}, ()),
    ],
)
def test_ranks_of_this_node_without_a_process_are_missing(
    environment: dict[str, str], missing: tuple[int, ...]
) -> None:
    assert missing_ranks({0: 11, 2: 12}, environment) == missing


def test_how_a_rank_ended_is_seen_until_its_parent_asks_and_known_of_torchrun_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = procfs.children
    with ranks(2, 4716) as started:
        # What other tests have left below this process is no child of a launcher.
        monkeypatch.setattr(procfs, "children", lambda pid: [one for one in everyone(pid) if one.pid in started])
        os.kill(started[1], signal.SIGKILL)
        wait_for(lambda: procfs.exit_status(started[1]) is not None, "it has ended")
        assert attach._exit_codes({0: started[0]}, [1]) == {1: -signal.SIGKILL}
        assert attach._exit_codes({0: started[0]}, [1, 2]) == {1: None, 2: None}
        monkeypatch.setattr(attach, "starts_ranks", lambda _: True)
        assert attach._exit_codes({0: started[0]}, [1, 2]) == {1: 0, 2: 0}
        assert attach._exit_codes({0: started[0]}, []) == {}
        assert procfs.exit_status(started[0]) is None


@pytest.mark.parametrize(
    ("scope", "advice"), [("0", "use sudo"), ("1", "use sudo, or allow it with `sysctl kernel.yama.ptrace_scope=0`")]
)
def test_stacks_that_may_not_be_read_come_with_the_way_to_allow_it(
    scope: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _options: list[str], failures: list[str]) -> None:
        failures.append("Permission denied (os error 13)")

    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(attach, "_PTRACE_SCOPE", tmp_path / "ptrace_scope")
    monkeypatch.setattr(attach, "py_spy", refuse)
    with pytest.raises(NoSuchJob) as refusal:
        attach._check_stacks(3, os.getpid())
    assert str(refusal.value).endswith(f"cannot be read: Permission denied (os error 13); {advice}")


def test_recorders_of_the_jobs_own_servers_are_stored_although_no_probe_wrote_anything(tmp_path: Path) -> None:
    """The attempt of an attached job has no directory for status files yet."""
    attempt = create_run(tmp_path / "reports").attempt("job", 1)
    attempt.path.mkdir()
    home = tmp_path / "own"
    home.mkdir()
    observer: Any = SimpleNamespace(probe_dir=home, job=SimpleNamespace(ranks={0: 5, 1: 6}, probe_dir=None))
    names = [protocol.FLIGHT.format(pid=pid) for pid in (5, 6)]
    (home / names[0]).write_text("{}")
    attach._store_recorders(observer, attempt)
    assert not attempt.probe_files.exists(), "one rank alone shows no difference"
    (home / names[1]).write_text("{}")
    attach._store_recorders(observer, attempt)
    assert sorted(path.name for path in attempt.probe_files.iterdir()) == sorted(names)
