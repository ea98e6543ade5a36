"""Several scenarios in one command: how often each runs, beside which others, what a plan cut short goes on with."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from .conftest import Workspace, processes_of
from .test_kills import wait_for

PLAN = 12


def program(workspace, name, source, *, tags="mine", **sections):
    """A scenario of one plain process, without torch: what is tested here is what happens around it."""
    run = {"ranks": 1, "command": [sys.executable, "-c", source]}
    workspace.scenario(name, json.dumps({"about": name, "tags": [tags], "run": run, **sections}))


def attempts(ran):
    return {
        (one["scenario"], one["attempt"]): (one["verdict"], one["cause"], one["final"], one["flaky"])
        for one in ran.report["outcomes"]
    }


PASSES = "print('fine')"
FAILS = "raise SystemExit(3)"
SECOND_TIME_LUCKY = """
import pathlib
seen = pathlib.Path('seen')
if not seen.exists():
    seen.touch()
    raise SystemExit(3)
"""


def test_each_scenario_runs_as_often_as_asked(workspace):
    program(workspace, "steady", PASSES)
    ran = workspace.harness("run", "steady", "--repeat", "3")
    assert ran.code == 0
    assert attempts(ran) == {("steady", n): ("PASS", None, n == 3, False) for n in (1, 2, 3)}
    assert [one["dir"] for one in ran.report["outcomes"]] == ["steady", "steady~2", "steady~3"]


def test_a_retry_that_passes_is_flaky_and_no_pass(workspace):
    program(workspace, "lucky", SECOND_TIME_LUCKY)
    ran = workspace.harness("run", "lucky", "--retries", "4")
    assert ran.code == 1
    assert attempts(ran) == {
        ("lucky", 1): ("FAIL", "bad_exit", False, True),
        ("lucky", 2): ("FAIL", "flaky", True, True),
    }
    assert "attempt 1 FAIL, attempt 2 PASS" in (ran.run_dir / "SUMMARY.md").read_text()


def test_a_failure_counts_once_its_retries_have_failed_too_and_then_nothing_more_is_started(workspace):
    program(workspace, "a", FAILS)
    program(workspace, "b", PASSES)
    ran = workspace.harness("run", "a", "b", "--retries", "1", "--maxfail", "1")
    assert ran.code == 1
    assert attempts(ran) == {("a", 1): ("FAIL", "bad_exit", False, False), ("a", 2): ("FAIL", "bad_exit", True, False)}
    assert "Not run: b" in (ran.run_dir / "SUMMARY.md").read_text()


def test_what_failed_last_is_run_again_as_it_was(workspace):
    program(workspace, "a", FAILS)
    program(workspace, "b", PASSES)
    assert workspace.harness("run", "a", "b").code == 1
    program(workspace, "a", PASSES)  # what is repeated is the launch of then, not the file of now
    again = workspace.harness("run", "--lf")
    assert list(attempts(again)) == [("a", 1)]
    assert again.code == 1


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """A run without failures, which nothing that follows on it changes."""
    workspace = Workspace(tmp_path_factory.mktemp("passed"))
    program(workspace, "b", PASSES)
    assert workspace.harness("run", "b").code == 0
    return workspace


@pytest.fixture
def plan_of(passed):
    """Its stored plan, for once another one."""
    document = passed.directory / "reports" / "latest" / "run.json"
    whole = document.read_text()
    yield document
    document.write_text(whole)


def test_after_a_run_without_failures_there_is_nothing_to_repeat(passed):
    again = passed.harness("run", "--lf")
    assert (again.code, again.err) == (0, "nothing to repeat: every scenario of the latest run ended as expected\n")


def test_shards_part_a_plan_without_gap_or_overlap(workspace):
    for name in "abcde":
        program(workspace, name, PASSES)
    parts = []
    for number in (1, 2):
        ran = workspace.harness("run", "-t", "mine", f"--shard={number}/2")
        parts.append([name for name, _ in attempts(ran)])
    assert parts == [["a", "c", "e"], ["b", "d"]]


MEETS = """
import pathlib, time
pathlib.Path('{own}').touch()
end = time.monotonic() + 60
while not pathlib.Path('{other}').exists() and time.monotonic() < end:
    time.sleep(0.01)
raise SystemExit(not pathlib.Path('{other}').exists())
"""


@pytest.mark.parametrize("jobs", ["2", pytest.param("auto", marks=pytest.mark.slow)])
def test_two_jobs_run_at_the_same_time(workspace, jobs):
    program(workspace, "a", MEETS.format(own="a", other="b"))
    program(workspace, "b", MEETS.format(own="b", other="a"))
    ran = workspace.harness("run", "a", "b", f"--jobs={jobs}")
    assert ran.code == 0
    assert attempts(ran) == {("a", 1): ("PASS", None, True, False), ("b", 1): ("PASS", None, True, False)}


def numbered(workspace):
    """Each program leaves a line when it begins, and ends when it may."""
    for number in range(PLAN):
        body = "import os; os.write(os.open('begun', os.O_WRONLY | os.O_APPEND | os.O_CREAT), b'p{:02} ')"
        program(workspace, f"p{number:02}", body.format(number))


def ended(workspace):
    """Scenarios of the newest run that were judged before it was cut short."""
    (run,) = (workspace.directory / "reports").glob("2*")
    return {path.parent.name for path in run.glob("*/verdict.json")}


@pytest.mark.parametrize("kill_after", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3, 6, 10))])
def test_a_killed_plan_goes_on_where_it_stopped(workspace, kill_after):
    numbered(workspace)
    controller = workspace.start("run", "-t", "mine", "--jobs", "2", "--maxfail", "1")
    wait_for(lambda: any((workspace.directory / "reports").glob("2*/run.json")))
    wait_for(lambda: len(ended(workspace)) >= kill_after)
    os.kill(controller.pid, signal.SIGKILL)
    controller.wait()
    before = ended(workspace)
    (run,) = (workspace.directory / "reports").glob("2*")
    (run / f"p{PLAN - 1:02}").mkdir(exist_ok=True)  # as one that was killed before it wrote its spec leaves it
    wait_for(lambda: not processes_of(workspace.directory))
    ran = workspace.harness("run", "--resume")
    assert ran.code == 0
    passed = [name for (name, _), row in attempts(ran).items() if row[0] == "PASS"]
    assert passed == [f"p{number:02}" for number in range(PLAN)]
    assert {name for (name, number) in attempts(ran) if number > 1}.isdisjoint(before)
    begun = (workspace.directory / "begun").read_text().split()
    assert all(begun.count(name) == 1 for name in before)
    assert set(begun) == set(passed)


def test_a_run_that_somebody_runs_cannot_be_resumed(workspace):
    program(workspace, "waits", "import time; time.sleep(600)")
    controller = workspace.start("run", "waits")
    wait_for(lambda: any((workspace.directory / "reports").glob("2*/waits/spec.json")))
    refused = workspace.harness("run", "--resume")
    os.kill(controller.pid, signal.SIGINT)
    controller.wait(timeout=60)
    assert refused.code == 2
    assert "another nsa-harness is running it" in refused.err


@pytest.mark.parametrize("damage", ["", "{", '{"schema": 1}'])
def test_a_plan_that_cannot_be_read_is_not_resumed(passed, plan_of, damage):
    plan_of.write_text(damage)
    refused = passed.harness("run", "--resume")
    assert refused.code == 2
    assert "run.json: the plan is missing or unreadable" in refused.err


def test_a_stored_plan_cannot_write_outside_of_its_run(passed, plan_of):
    stored = json.loads(plan_of.read_text())
    stored["plan"][0]["scenario"] = "../../outside"
    plan_of.write_text(json.dumps(stored))
    refused = passed.harness("run", "--resume")
    assert refused.code == 2
    assert "plan.0.scenario: expected a scenario's name" in refused.err
    assert not (passed.directory / "outside").exists()


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_jobs_and_leaves_a_report(workspace, times):
    for name in ("a", "b", "c"):
        program(workspace, name, "import time; print('here', flush=True); time.sleep(600)")
    controller = workspace.start("run", "-t", "mine", "--jobs", "2")
    wait_for(
        lambda: len([p for p in (workspace.directory / "reports").glob("2*/*/output.log") if p.stat().st_size]) == 2
    )
    for answer in ("interrupted:", "interrupted twice:")[:times]:
        controller.send_signal(signal.SIGINT)  # two at once would be one
        wait_for(lambda answer=answer: answer in (workspace.directory / "out.txt").read_text())
    ran = workspace.finished(controller)
    assert ran.code == 130
    assert {name for name, _ in attempts(ran)} == {"a", "b"}
    assert all(row[:2] == ("ERROR", "interrupted") for row in attempts(ran).values())
    assert not processes_of(workspace.directory)
