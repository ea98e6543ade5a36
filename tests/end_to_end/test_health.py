"""`selftest` and `doctor --overhead` for real: faults under torchrun, commands bare and under the harness."""

from __future__ import annotations

import json
import sys

import pytest

from nsa_harness.commands.overhead import measured, ranks_of
from nsa_harness.commands.selftest import SelftestRequest, selftest
from nsa_harness.core.selftest.selftest import SELFTEST_FAULTS
from nsa_harness.errors import UsageError

TWO = [kind for kind in SELFTEST_FAULTS if kind.name in ("raise", "skip_collective")]


@pytest.mark.slow
def test_a_selftest_of_two_faults_and_a_twin_finds_them_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    request = SelftestRequest(full=False, score=False, seed=4, out=None, command="nsa-harness selftest")
    assert selftest(request, TWO) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["right", "skip_collective"],
        ["right", "raise"],
        ["right", "raise_twin"],
    ]
    assert "3 of 3 right" in lines
    report = json.loads((tmp_path / "reports" / "latest" / "report.json").read_text())
    assert [outcome["verdict"] for outcome in report["outcomes"]] == ["HANG", "FAIL", "PASS"]
    assert all(outcome["expected"] for outcome in report["outcomes"])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_whole_selftest_is_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    request = SelftestRequest(full=True, score=True, seed=17, out=None, command="nsa-harness selftest --full --score")
    code = selftest(request)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    values = json.loads(shown.out)
    assert values["right"] == values["of"] == 2 * len(SELFTEST_FAULTS)
    assert {score["recall"] for score in values["causes"].values()} == {1.0}


def test_the_cost_of_a_command_is_measured_in_pairs(workspace):
    ran = workspace.harness("doctor", "--overhead", "--json", "--", sys.executable, "-c", "print('hello')")
    overhead = json.loads(ran.out)["overhead"]
    assert ran.code == 0, ran.err
    assert 3 <= len(overhead["pairs"]) <= 7
    assert all(pair["harness_s"] > pair["after_s"] > 0 for pair in overhead["pairs"])
    assert all(pair["bare_s"] > 0 for pair in overhead["pairs"])
    assert not (workspace.directory / "reports").exists()


def test_a_command_that_fails_is_not_measured():
    with pytest.raises(UsageError, match="the command ends with 1 without the harness: no data; mend it first"):
        measured([sys.executable, "-c", "raise SystemExit('no data')"], print)


def test_a_command_that_is_not_there_is_not_measured():
    with pytest.raises(UsageError, match="no-such-program cannot be started: No such file or directory"):
        measured(["no-such-program"], print)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node=4 train.py", 4),
        ("torchrun --nproc_per_node 2 train.py", 2),
        ("torchrun --nproc-per-node=gpu train.py", 1),
        ("python train.py", 1),
    ],
)
def test_the_ranks_of_a_command_are_those_of_its_torchrun(command, ranks):
    assert ranks_of(command.split()) == ranks
