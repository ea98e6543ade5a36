"""Waits that are no collective: proven at once where nobody can end them, and after long where somebody might."""

from __future__ import annotations

import fcntl
import os

import pytest

from .conftest import PROGRAMS

QUICK = (
    "stall_s: 3, open_wait_s: 9000, deadline_s: 120"  # a wait that somebody might end is no HANG before the deadline
)


def scenario(what: str, value: str, limits: str) -> str:
    program = PROGRAMS / "waits.py"
    return f'about: waits\nrun: {{ranks: 2, program: {program}, args: [{what}, "{value}"]}}\nlimits: {{{limits}}}\n'


def line_of(text: str) -> int:
    lines = (PROGRAMS / "waits.py").read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


# Closed: nobody can end the wait.

HUNG = [
    ("transfer", "deadlock", "p2p_unmatched", [0, 1], "dist.recv(told"),
]
HUNG_TOO = [
    ("key", "deadlock", "store_key_missing", [1], 'elif value == "well":'),
    ("full", "deadlock", "pipe_full", [1], "os.write(writer"),
    ("worker", "deadlock", "dataloader_worker_blocked", [1], "with LOCK:  # held while the worker is forked"),
    ("group", "deadlock", "group_creation_subset", [1], "dist.new_group("),
    ("turns", "deadlock", "lock_cycle", [0], "            fcntl.flock(file, fcntl.LOCK_EX)\n"),
    ("child_full", "deadlock", "pipe_full", [1], "print('x'"),
    ("child_stopped", "stopped", "stopped_process", [1], "    child.wait()"),
    ("forked", "deadlock", "fork_lock", [1], "with LOCK:  # held while the child is forked"),
]


@pytest.mark.parametrize(
    ("what", "kind", "cause", "ranks", "line"),
    [*HUNG, *(pytest.param(*case, marks=pytest.mark.slow) for case in HUNG_TOO)],
    ids=[case[0] for case in [*HUNG, *HUNG_TOO]],
)
def test_a_wait_that_nobody_can_end_is_proven_at_once(launcher, what, kind, cause, ranks, line):
    outcome = launcher.outcome_of("waiting", scenario(what, "ill", QUICK))

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", kind, cause)
    assert outcome["culprit"]["ranks"] == ranks
    if what not in ("turns", "child_full", "child_stopped"):
        assert outcome["culprit"]["place"]["line"] == line_of(line)


@pytest.mark.parametrize(
    "what",
    [
        "transfer",
        *(pytest.param(case[0], marks=pytest.mark.slow) for case in [*HUNG[1:], *HUNG_TOO]),
    ],
)
def test_the_same_wait_that_ends_after_some_seconds_passes(launcher, what):
    outcome = launcher.outcome_of("waiting", scenario(what, "well", QUICK))

    assert (outcome["verdict"], outcome["findings"]) == ("PASS", [])


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_rendezvous_is_named(workspace):
    lock = workspace.directory / "lock"
    os.mkfifo(workspace.directory / "lock.locked")
    workspace.scenario("outside", scenario("entrance", str(lock), "start_s: 5, deadline_s: 120"))
    outcome = workspace.harness("run", "outside").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "deadlock", "rendezvous_missing_rank")
    assert outcome["culprit"]["ranks"] == [1]
    assert "a lock on a file" in outcome["summary"]


@pytest.mark.slow
def test_a_rank_that_the_others_gave_up_waiting_for_is_named_by_its_key(workspace):
    workspace.scenario("three", scenario("too_many", "", "deadline_s: 120"))
    outcome = workspace.harness("run", "three").outcome

    assert (outcome["verdict"], outcome["cause"]) == ("FAIL", "rendezvous_missing_rank")
    assert outcome["culprit"]["ranks"] == [2]


# Open: somebody outside might end it.


@pytest.mark.slow
def test_a_pipe_that_nobody_writes_to_is_blocked_io_after_the_open_wait_limit(workspace):
    pipe = workspace.directory / "pipe"
    os.mkfifo(pipe)
    workspace.scenario("piped", scenario("pipe", str(pipe), "open_wait_s: 9, deadline_s: 120"))
    outcome = workspace.harness("run", "piped").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "blocked_io")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["line"] == line_of("os.read(os.open(")
    assert outcome["timing"]["quiet_s"] >= 9


@pytest.mark.slow
def test_a_file_lock_that_somebody_outside_holds_is_an_open_wait(workspace):
    lock = workspace.directory / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        workspace.scenario("locked", scenario("locked", str(lock), "stall_s: 3, open_wait_s: 9, deadline_s: 120"))
        outcome = workspace.harness("run", "locked").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "blocked_io")
    assert "a lock on a file" in outcome["summary"]
    assert outcome["timing"]["quiet_s"] >= 9


@pytest.mark.slow
def test_a_sleep_that_ends_after_the_deadline_is_starved_at_once(workspace):
    workspace.scenario("sleeper", scenario("sleep", "9000", "deadline_s: 120"))
    outcome = workspace.harness("run", "sleeper").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "starved")
    assert outcome["culprit"]["place"]["line"] == line_of("time.sleep(float")


@pytest.mark.slow
def test_a_sleep_that_ends_in_time_is_waited_for(workspace):
    workspace.scenario("napper", scenario("sleep", "12", "open_wait_s: 8, deadline_s: 120"))
    ran = workspace.harness("run", "napper")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
