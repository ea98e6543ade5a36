"""Waits for the world outside the job: starved only after long, or when the kernel shows that they end too late."""

from __future__ import annotations

import os

from .conftest import PROGRAMS


def scenario(what: str, value: str, limits: str) -> str:
    program = PROGRAMS / "waits.py"
    return f'about: waits\nrun: {{ranks: 2, program: {program}, args: [{what}, "{value}"]}}\nlimits: {{{limits}}}\n'


def line_of(text: str) -> int:
    lines = (PROGRAMS / "waits.py").read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def test_a_pipe_that_nobody_writes_to_is_blocked_io_after_the_open_wait_limit(workspace):
    pipe = workspace.directory / "pipe"
    os.mkfifo(pipe)
    workspace.scenario("piped", scenario("pipe", str(pipe), "open_wait_s: 9, deadline_s: 120"))
    outcome = workspace.harness("run", "piped").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "blocked_io")
    assert (outcome["culprit"]["ranks"], outcome["victims"]) == ([1], [0])
    assert outcome["culprit"]["place"]["line"] == line_of("os.read(os.open(")
    assert 9 <= outcome["timing"]["quiet_s"] <= 13


def test_a_sleep_that_ends_after_the_deadline_is_starved_at_once(workspace):
    workspace.scenario("sleeper", scenario("sleep", "9000", "deadline_s: 120"))
    outcome = workspace.harness("run", "sleeper").outcome

    assert (outcome["verdict"], outcome["kind"], outcome["cause"]) == ("HANG", "starved", "starved")
    assert outcome["culprit"]["place"]["line"] == line_of("time.sleep(")
    assert outcome["timing"]["detected_s"] <= 15


def test_a_sleep_that_ends_in_time_is_waited_for(workspace):
    workspace.scenario("napper", scenario("sleep", "12", "open_wait_s: 8, deadline_s: 120"))
    ran = workspace.harness("run", "napper")

    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
