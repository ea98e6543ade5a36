"""The pytest plugin, in pytest sessions of their own over the tests of a made-up project."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from nsa_harness.pytest_plugin.launching import Runs, _longer_timeout

PLUGIN = "nsa_harness.pytest_plugin"
CONFTEST = """\
import pytest

def pytest_addoption(parser):
    parser.addoption("--model", default="tiny")

@pytest.fixture
def model(request):
    return request.config.getoption("--model")

@pytest.fixture
def rank_file(tmp_path):
    import torch.distributed as dist
    file = tmp_path / f"of-rank-{dist.get_rank()}"
    file.write_text(str(dist.get_rank()))
    yield file
    file.unlink()
"""
TESTS = """\
import threading

import pytest
import torch
import torch.distributed as dist

def test_of_one_process():
    assert not dist.is_initialized()

@pytest.mark.ranks(2)
@pytest.mark.parametrize("shift", [1, 5])
def test_sum(shift, model, rank_file):
    value = torch.tensor([float(dist.get_rank() + shift)])
    dist.all_reduce(value)
    assert rank_file.read_text() == str(dist.get_rank())
    assert (dist.get_world_size(), model, value.item()) == (2, "large", 2 * shift + 1)

@pytest.mark.ranks(2)
def test_wrong_on_one_rank():
    print("seen on rank", dist.get_rank())
    assert dist.get_rank() * 10 < 5

@pytest.mark.ranks(2)
def test_that_hangs():
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@pytest.mark.ranks(2)
def test_that_waits_for_a_rank_that_is_done():
    if dist.get_rank() == 1:
        dist.barrier()

@pytest.mark.ranks(2)
def test_that_is_skipped():
    pytest.skip("nothing to do here")

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_that_may_fail():
    assert False

@pytest.mark.ranks(2)
def test_that_only_one_rank_skips():
    if dist.get_rank() == 1:
        pytest.skip("not on this rank")

@pytest.mark.ranks(1, backend=None)
def test_without_a_process_group():
    assert not dist.is_initialized()

@pytest.mark.ranks(2)
@pytest.mark.timeout(20)
def test_that_is_too_slow():
    while True:
        dist.barrier()

@pytest.mark.ranks(2, backend="gloo", world=3)
def test_with_a_wrong_marker():
    pass

def sum_of_ranks(shift, plus=0):
    value = torch.tensor([float(dist.get_rank() + shift)])
    dist.all_reduce(value)
    return dist.get_rank(), value + plus

@pytest.fixture(scope="module")
def sums(nsa_ranks):
    return nsa_ranks(sum_of_ranks, 5, plus=1)

def test_results(sums):
    assert [(rank, value.item()) for rank, value in sums] == [(0, 12), (1, 12)]
    assert not dist.is_initialized()

def fails_on_one_rank():
    assert dist.get_rank() * 10 < 5
    return lambda: 1

def test_that_calls_what_fails(nsa_ranks):
    nsa_ranks(fails_on_one_rank, ranks=2)

def test_with_a_result_that_cannot_be_pickled(nsa_ranks):
    nsa_ranks(fails_on_one_rank, ranks=1)

def test_with_a_function_that_cannot_be_pickled(nsa_ranks):
    nsa_ranks(lambda: 1)
"""
SCRIPT = """\
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("of rank 1")
dist.barrier()
dist.destroy_process_group()
"""
SCRIPT_TESTS = """\
def test_script(nsa_run):
    outcome = nsa_run("train.py", "fail", ranks=2)
    assert (outcome.verdict.status, outcome.culprit.ranks) == ("FAIL", (1,))
    assert nsa_run("train.py", limits__deadline_s=120).verdict.status == "PASS"
"""
SCENARIOS = """\
name: steps
about: the script with two arguments
tags: [quick]
run: {program: train.py, ranks: 2}
matrix: {run.args: [[go], [fail]]}
"""


def run_pytest(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NSA_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *words],
        cwd=directory, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip


def results(file: Path) -> dict[str, tuple[str, str]]:
    """Return the result and the text of each test in a JUnit file."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        child = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        text = "" if child is None else f"{child.get('message')}\n{child.text}"
        found[str(case.get("name"))] = ("passed" if child is None else child.tag, text)
    return found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    directory = tmp_path_factory.mktemp("project")
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_ranks.py").write_text(TESTS)
    run_pytest(directory, "--junitxml=results.xml", "--model=large", "--nsa-out=runs")
    assert len([path for path in (directory / "runs").iterdir() if not path.is_symlink()]) == 13
    return results(directory / "results.xml")


def test_a_body_runs_on_every_rank_with_its_parameters_fixtures_and_options(
    session: dict[str, tuple[str, str]],
) -> None:
    for name in ("test_of_one_process", "test_sum[1]", "test_sum[5]"):
        assert session[name] == ("passed", "")


def test_a_failing_assertion_names_its_rank_and_is_rewritten(session: dict[str, tuple[str, str]]) -> None:
    result, text = session["test_wrong_on_one_rank"]
    assert result == "failure"
    assert "rank 1 failed:" in text
    assert "assert (1 * 10) < 5" in text
    assert "seen on rank 1" in text
    assert "seen on rank 0" not in text


def test_an_exception_of_torch_shows_the_line_of_the_test_and_which_rank_is_missing(
    session: dict[str, tuple[str, str]],
) -> None:
    result, text = session["test_that_waits_for_a_rank_that_is_done"]
    assert result == "failure"
    assert "rank 1 failed:" in text
    assert ">           dist.barrier()" in text
    assert "RuntimeError: " in text
    assert "\nwhy: rank 0 ended with exit code 0 while the others still needed it" in text
    assert "call_original" not in text
    assert "INTERNALERROR" not in text


def test_a_hang_is_told_with_cause_rank_and_line(session: dict[str, tuple[str, str]]) -> None:
    result, text = session["test_that_hangs"]
    assert result == "failure"
    assert "HANG  test_that_hangs" in text
    line = TESTS.split("\n").index("        threading.Event().wait()") + 1
    assert f"rank 1   test_ranks.py:{line}   test_that_hangs" in text
    assert "> threading.Event().wait()" in text
    assert "program.py" not in text
    assert "no process left" in text


def test_skips_expected_failures_and_markers_are_pytests_own(session: dict[str, tuple[str, str]]) -> None:
    assert session["test_that_is_skipped"][0] == "skipped"
    assert session["test_that_is_skipped"][1].startswith("nothing to do here\n")
    assert session["test_that_may_fail"][0] == "skipped"  # JUnit's word for an expected failure
    result, text = session["test_with_a_wrong_marker"]
    assert (result, "unexpected keyword argument 'world'" in text) == ("failure", True)


def test_a_skip_on_one_rank_is_a_failure_and_a_backend_is_optional(session: dict[str, tuple[str, str]]) -> None:
    result, text = session["test_that_only_one_rank_skips"]
    assert (result, "only rank 1 skipped the test: not on this rank" in text) == ("failure", True)
    assert session["test_without_a_process_group"] == ("passed", "")


def test_a_function_is_called_on_every_rank_and_its_results_are_returned(session: dict[str, tuple[str, str]]) -> None:
    assert session["test_results"] == ("passed", "")
    result, text = session["test_that_calls_what_fails"]
    assert (result, "rank 1 failed:" in text, "assert (1 * 10) < 5" in text) == ("failure", True, True)
    for what, reason in (
        ("result", "the result of fails_on_one_rank cannot be"),
        ("function", "TypeError: nsa_ranks:"),
    ):
        result, text = session[f"test_with_a_{what}_that_cannot_be_pickled"]
        assert (result, reason in text, "<lambda>" in text) == ("failure", True, True)


def test_the_run_is_judged_before_pytest_timeout_ends_the_test(session: dict[str, tuple[str, str]]) -> None:
    result, text = session["test_that_is_too_slow"]
    assert result == "failure"
    assert "FAIL  test_that_is_too_slow" in text
    assert "deadline of 14 s" in text
    assert "no process left" in text


def test_pytest_timeout_waits_for_the_judgement_of_a_run() -> None:
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)  # of the limit in pyproject.toml
    with _longer_timeout():
        assert signal.getitimer(signal.ITIMER_REAL)[0] > left_s + 30
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= left_s


def test_two_workers_never_use_the_same_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker asks for two of three GPUs; the second gets them only when the first has given its own back."""
    spec: Any = SimpleNamespace(device="cuda", ranks=2)
    monkeypatch.setattr(Runs, "_shared", lambda _: tmp_path)
    workers = []
    for _ in range(2):
        runs = Runs.__new__(Runs)
        runs.__dict__ |= {"_config": SimpleNamespace(workerinput={}), "facts": SimpleNamespace(gpus=("a", "b", "c"))}
        workers.append(runs)
    taken: list[tuple[int, ...] | None] = []
    with ExitStack() as second:
        with ExitStack() as first:
            taken.append(workers[0]._lease(spec, first))
            waiting = threading.Thread(target=lambda: taken.append(workers[1]._lease(spec, second)))
            waiting.start()
            waiting.join(0.5)
            assert taken == [(0, 1)]
        waiting.join()
    assert len(set(taken[1] or ())) == 2


def test_scenarios_are_tests(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "test_it.py").write_text(SCRIPT_TESTS)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "steps.yaml").write_text(SCENARIOS)
    needs = "name: big\nabout: needs GPUs\nneeds: {gpus: 64}\nrun: {program: train.py, ranks: 2}\n"
    (tmp_path / "scenarios" / "big.yaml").write_text(needs)
    (tmp_path / "scenarios" / "wrong.yaml").write_text("name: wrong\nabut: typo\n")

    listed = run_pytest(tmp_path, "--nsa-scenarios", "--collect-only", "-q", "-m", "quick").stdout
    assert [line for line in listed.split("\n") if "::" in line and "ERROR" not in line] == [
        'scenarios/steps.yaml::steps@run.args=go', 'scenarios/steps.yaml::steps@run.args=fail',
    ]  # fmt: skip
    assert 'wrong.yaml:2:1: abut: unknown key; did you mean "about"?' in listed

    (tmp_path / "scenarios" / "wrong.yaml").unlink()
    run_pytest(tmp_path, "test_it.py", "--nsa-scenarios=scenarios", "--junitxml=results.xml")
    found = results(tmp_path / "results.xml")
    assert {name: result for name, (result, _) in found.items()} == {
        "test_script": "passed", "big": "skipped", "steps@run.args=go": "passed", "steps@run.args=fail": "failure",
    }  # fmt: skip
    assert "ValueError: of rank 1" in found["steps@run.args=fail"][1]


CHOSEN_TESTS = """\
import pytest

@pytest.mark.ranks(1, backend=None)
@pytest.mark.parametrize("number", [1, 2])
def test_number(number):
    assert number == 1
"""
CODES = """\
name: codes
about: a command that ends with an exit code
tags: [quick]
run: {ranks: 1, command: [sh, -c, exit 0]}
matrix: {run.command: [[sh, -c, exit 0], [sh, -c, exit 1], [sh, -c, exit 2]]}
"""


def test_tests_are_chosen_repeated_and_spread_as_always(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CHOSEN_TESTS)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "codes.yaml").write_text(CODES)

    def choose(*words: str) -> tuple[str, list[str]]:
        """Return the output, and the tests in it: 1 and 2 on ranks, 0 to 2 of the scenario."""
        out = run_pytest(tmp_path, "test_it.py", "--nsa-scenarios", "-p", "cacheprovider", *words).stdout
        return out, re.findall(r"^(?:scenarios|test_it).*::(?:codes.*exit_|test_number\[)(\d)\]?$", out, re.M)

    assert "3 failed, 2 passed" in choose("-n2", "--dist=loadfile")[0]
    assert choose("--lf", "--collect-only", "-q")[1] == ["2", "1", "2"]
    assert choose("-m", "ranks", "-k", "not 2", "--collect-only", "-q")[1] == ["1"]
    assert "1 failed, 1 passed, 2 deselected" in choose("-x", "-m", "quick")[0]


def test_the_plugin_does_nothing_until_it_is_asked() -> None:
    code = f"import pytest, sys; before = set(sys.modules); import {PLUGIN}; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 3  # the package, the plugin, and nothing that they import
