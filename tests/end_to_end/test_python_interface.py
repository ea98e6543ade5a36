"""The Python interface: what `nsa_harness` exports, and runs from another program."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from documents import text

import nsa_harness
from nsa_harness import Outcome, RunSpec, Skip, Status, UsageError, plan, run_one

LEAVES = "import sys\nsys.exit(3)\n"


def test_the_example_of_the_page_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", text("docs/python.md"), re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(example, names)
    outcome = names["outcome"]
    assert isinstance(outcome, Outcome)
    assert outcome.spec.scenario == "ddp_onestep"
    assert (tmp_path / "reports" / "latest" / outcome.dir / "spec.json").is_file()


def test_a_failing_script_is_an_outcome_in_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text(LEAVES)
    (spec,) = plan(script="leaves.py", ranks=1)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run_one(spec, out=tmp_path / "out")))
    thread.start()
    thread.join()
    (outcome,) = outcomes
    assert (outcome.verdict.status, outcome.culprit and outcome.culprit.ranks) == (Status.FAIL, (0,))
    assert (tmp_path / "out" / "latest" / "SUMMARY.md").is_file()
    assert not (tmp_path / "reports").exists()


def test_a_scenario_that_this_machine_cannot_run_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many_gpus.yaml").write_text("extends: base/ddp\nneeds: {gpus: 64}\n")
    (skip,) = plan("many_gpus.yaml")
    assert isinstance(skip, Skip)
    assert run_one(skip).verdict.status is Status.SKIP


def test_planning_launches_nothing_and_reports_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (spec,) = plan("ddp_onestep", "train.steps=3")
    assert isinstance(spec, RunSpec)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="ddp_onestep"):
        plan("ddp_onestp")


def test_the_public_names_load_on_first_use_and_no_others_exist() -> None:
    assert all(getattr(nsa_harness, name) is not None for name in nsa_harness.__all__)
    with pytest.raises(AttributeError, match="no attribute 'run_two'"):
        _ = nsa_harness.run_two
    code = "import sys, nsa_harness; print({'torch', 'pydantic', 'typer'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
