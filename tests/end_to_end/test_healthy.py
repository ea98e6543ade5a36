"""The two commands of the README, judged by everything they leave behind."""

from __future__ import annotations

import csv
import json
import re

import pytest

from nsa_attention.config import SHAPES
from nsa_attention.model import TinyLM
from nsa_harness.core.plan import Launcher
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.supervisor.storage.rundir import create_run

from .conftest import Ran, Workspace
from .test_forked import Launches, ends_of, scenario

SECRET = "hunter2-hunter2"


@pytest.fixture(scope="module")
def onestep(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run that many look at: events for programs, and a shell with a secret and a variable of the subject."""
    workspace = Workspace(tmp_path_factory.mktemp("onestep"))
    return workspace.harness("run", "ddp_onestep", "--json", MY_SECRET_TOKEN=SECRET, NSA_TRACE_MODULE_BWD="0")


def test_ddp_onestep_passes_with_every_artifact(onestep):
    ran = onestep
    outcome, home = ran.outcome, ran.run_dir / "ddp_onestep"

    assert (ran.code, outcome["verdict"], outcome["expected"]) == (0, "PASS", True)
    # null: torchrun took the status of its rank before the guardian saw it.
    assert set(outcome["exit_codes"].values()) <= {0, None}
    assert outcome["last_step"] == {"0": 1, "1": 1}
    assert outcome["trouble"] == []
    for name in ("test_execution.log", "SUMMARY.md", "report.json", "junit.xml", "report.html", "events.jsonl"):
        assert (ran.run_dir / name).stat().st_size > 0, name
    assert (ran.run_dir / "all_missing_params.txt").read_text() == ""
    present = {path.name for path in home.iterdir()}
    assert present >= {
        "spec.json", "command.txt", "output.log", "traces.log", "result.txt", "env.json", "heartbeat_rank0.jsonl",
        "heartbeat_rank1.jsonl", "training.csv", "k_stats.csv", "gate_health.csv", "fallback_counters.csv",
        "dtypes_report.txt", "rank0", "rank1", "evidence", "verdict.json",
    }  # fmt: skip
    assert (home / "result.txt").read_text() == "PASS\n"


def test_the_traces_of_ddp_onestep_count_real_gradients_and_buckets(onestep):
    traces = (onestep.run_dir / "ddp_onestep" / "traces.log").read_text()

    arrived = re.findall(r"^\[rank(\d)\] \[GRAD-TRACE\] after_backward_step1 arrived=(\d+) missing=0$", traces, re.M)
    assert [rank for rank, _ in arrived] == ["0", "1"]
    buckets = re.findall(r"\[DDP\] rank=0 bucket_elems=(\d+) dtype=torch.float32", traces)
    step1 = int(buckets[0])  # DDP keeps one bucket in its first step and its real ones after it
    assert step1 == sum(parameter.numel() for parameter in TinyLM.from_config(SHAPES["ci"]).parameters())
    loss = float(next(csv.DictReader((onestep.run_dir / "ddp_onestep" / "training.csv").open()))["loss"])
    assert 5.0 < loss < 6.0


def test_forked_ranks_compute_the_same_numbers_as_those_of_torchrun(onestep, server, tmp_path):
    launches = Launches(home=create_run(tmp_path).path, server=server)
    forked = launches.launch(scenario("ddp_onestep"), Launcher.FORK, "ddp_onestep")
    outcome, anew = outcome_values(forked.outcome), onestep.outcome

    assert forked.spec.launcher is Launcher.FORK, forked.spec.notes
    for part in ("verdict", "cause", "kind", "findings"):
        assert outcome[part] == anew[part], part
    assert forked.ends == ends_of(onestep.run_dir / "ddp_onestep" / "evidence")
    assert outcome["detail"]["metrics"]["loss_last"] == anew["detail"]["metrics"]["loss_last"]
    assert len(outcome["detail"]["artifacts"]) == len(anew["detail"]["artifacts"])


@pytest.mark.slow
def test_text_train_lowers_the_loss_on_real_text(workspace):
    ran = workspace.harness("run", "text_train")
    rows = list(csv.DictReader((ran.run_dir / "text_train" / "training.csv").open()))

    assert (ran.code, ran.outcome["verdict"], len(rows)) == (0, "PASS", 60)
    assert float(rows[-1]["loss"]) < 0.7 * float(rows[0]["loss"])


@pytest.mark.slow
def test_a_frozen_parameter_is_missing_by_name(workspace):
    ran = workspace.harness("run", "ddp_onestep", "train.freeze=blocks.1.attn.gate_mlp.*")
    missing = (ran.run_dir / "all_missing_params.txt").read_text()

    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (1, "FAIL", "expectation_missed")
    assert "MISSING: blocks.1.attn.gate_mlp" in missing
    assert "no_gradient" in [finding["code"] for finding in ran.outcome["findings"]]


def test_a_foreign_script_runs_unmodified_and_its_own_modules_shadow_nothing(workspace):
    (workspace.directory / "harness.py").write_text("raise RuntimeError('the user has a harness.py of their own')")
    (workspace.directory / "nsa").mkdir()
    (workspace.directory / "nsa" / "__init__.py").write_text("raise RuntimeError('and a package nsa')")
    program = workspace.directory / "train.py"
    program.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(3)\n"
        "dist.all_reduce(total)\n"
        "ours = [name for name in sys.modules if name.startswith('nsa_harness')]\n"
        "print('sum', total.sum().item(), sys.argv[1:], ours)\n"
        "dist.destroy_process_group()\n"
    )
    ran = workspace.harness("run", "--script", "train.py", "--ranks", "2", "--", "--flag", "value")

    output = (ran.run_dir / "train" / "output.log").read_text()
    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
    assert output.count("sum 6.0 ['--flag', 'value'] []") == 2
    assert ran.outcome["trouble"] == []


def test_a_plain_process_without_ranks_is_watched_as_rank_0(workspace):
    ran = workspace.harness("run", "ddp_onestep", "run.ranks=1", "parallel.wrapper=none")

    spec = json.loads((ran.run_dir / "ddp_onestep" / "spec.json").read_text())
    assert (ran.code, ran.outcome["verdict"], spec["launcher"]) == (0, "PASS", "plain")
    assert ran.outcome["last_step"] == {"0": 1}


def test_the_event_stream_tells_the_run_in_order_and_text_goes_to_stderr(onestep):
    events = [json.loads(line) for line in onestep.out.splitlines()]

    assert [events[0]["event"], events[1]["event"]] == ["plan", "launch"]
    assert [event["event"] for event in events[-2:]] == ["outcome", "done"]
    assert {event["schema"] for event in events} == {1}
    assert "PASS" in onestep.err


def test_nothing_of_the_shell_leaks_into_what_is_written(onestep):
    written = [path for path in onestep.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert "[MODULE-BWD]" not in (onestep.run_dir / "ddp_onestep" / "traces.log").read_text()
