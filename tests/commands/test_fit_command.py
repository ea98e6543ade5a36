"""nsa-harness fit on stored runs: the prediction, its check at half the size, and what it refuses, with exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runs import run

from nsa_harness.commands.fit import RequestedSize, fit
from nsa_harness.core.report import MachineFacts, Outcome, Report, StepCost
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.terminal.screen import done_lines
from nsa_harness.subject.playbook import PLAYBOOK


def cell(tokens: int, seconds: float, implementation: str, *, layers: int = 2) -> Outcome:
    cost = StepCost(
        tokens=tokens,
        layers=layers,
        batch=1,
        seconds=seconds,
        error=0.01,
        cpu_s=2 * seconds,
        cpu_error=0.01,
        steps=6,
        nodes=424,
        bytes=50_000 * tokens,
        peak_bytes=None,
        implementations=("cmp fused_cpu", f"sel {implementation}"),
        until_tokens=1024 if implementation == "fused_cpu" else None,
    )
    return run(f"sweep@model.seq_len={tokens}", settings={"model.seq_len": str(tokens)}, cost=cost)


SWEEP = (
    *(cell(tokens, 1e-4 * tokens, "fused_cpu") for tokens in (256, 512, 768)),
    *(cell(tokens, 0.1 + 3e-4 * tokens, "blockwise") for tokens in (1024, 1280, 1536, 2048)),
)


def report_of(*outcomes: Outcome) -> Report:
    machine = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")
    return Report(run_id="r", harness="0", machine=machine, command="run", interrupted=False, outcomes=outcomes)


def stored(directory: Path, *outcomes: Outcome) -> Path:
    directory.mkdir()
    (directory / "run.json").write_text('{"schema": 1, "plan": []}')
    (directory / "report.json").write_text(to_json(report_of(*outcomes)))
    return directory


def test_a_larger_step_is_predicted_with_the_run_that_checks_it(tmp_path: Path) -> None:
    answer = fit([stored(tmp_path / "sweep", *SWEEP)], RequestedSize(tokens=8192, layers=None), tmp_path)
    assert answer.code == 0
    told = "\n".join(answer.lines)
    assert "Memory grows" not in told
    assert (
        "Time grows as T^0.8 (0.7 to 0.9), processor time grows as T^0.8 (0.7 to 0.9), memory grows as T^1.0, autograd"
        " nodes do not grow, from 1024 to 2048 tokens with sel blockwise." in told
    )
    assert "8192 tokens, 2 layers:\n  time: 2.6 s (" in told
    assert "  memory: 410 MB (409 MB to 410 MB)\n  autograd nodes: 424 (424 to 426)\n" in told
    assert "nsa-harness run sweep --matrix model.seq_len=4096 --matrix model.layers=2 train.steps=7" in told


@pytest.mark.parametrize(("seconds", "code", "word"), [(1.33, 0, "inside"), (3.0, 1, "OUTSIDE")])
def test_a_run_at_half_the_size_bears_it_out_or_contradicts_it(
    tmp_path: Path, seconds: float, code: int, word: str
) -> None:
    sweep, check = stored(tmp_path / "sweep", *SWEEP), stored(tmp_path / "check", cell(4096, seconds, "blockwise"))
    answer = fit([sweep, check], RequestedSize(tokens=8192, layers=None), tmp_path)
    told = "\n".join(answer.lines)
    assert answer.code == code
    assert "checked at 4096 tokens, 2 layers:\n  time: predicted 1.3 s (" in told
    assert f"measured {seconds:.1f} s:" in told
    assert f"{word} the interval" in told
    # It is held against the fit, and no part of it.
    assert "from 1024 to 2048 tokens with sel blockwise." in told


def test_what_another_implementation_would_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    answer = fit([stored(tmp_path / "sweep", *SWEEP[:3])], RequestedSize(tokens=8192, layers=None), tmp_path)
    assert answer.code == 125
    assert answer.lines[-1] == (
        "8192 tokens, 2 layers: no prediction, because the runs up to 768 tokens ran with one implementation, and from"
        " 1024 tokens another implementation runs: measure three lengths above that"
    )


def test_half_of_a_sweep_over_layers_are_half_the_layers(tmp_path: Path) -> None:
    layers = [
        replace(
            one,
            cost=replace(one.cost, layers=number, tokens=2048),
            spec=replace(one.spec, scenario=f"sweep_production@model.layers={number}"),
        )
        for number, one in enumerate([cell(2048, 1.0 + 0.5 * number, "blockwise") for number in (1, 2, 3, 4)], start=1)
        if one.cost
    ]
    answer = fit([stored(tmp_path / "sweep", *layers)], RequestedSize(tokens=None, layers=12), tmp_path)
    told = "\n".join(answer.lines)
    assert "2048 tokens, 12 layers:\n  time: 7.0 s" in told
    assert "run sweep_production --matrix model.seq_len=2048 --matrix model.layers=6 train.steps=7" in told


def test_runs_without_a_sweep_are_a_mistake_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nsa-harness run sweep_seq_len"):
        fit([stored(tmp_path / "one", SWEEP[0])], RequestedSize(tokens=8192, layers=None), tmp_path)


def test_the_summary_and_the_screen_tell_the_cells_and_how_they_grow() -> None:
    report = report_of(*SWEEP)
    text = summary_md(report, PLAYBOOK)
    assert "## Cost of a step: sweep\n" in text
    assert "| sweep@model.seq_len=2048 [PASS](#run-7) | 0.71 s | 1.4 s | 2867 | 102 MB | 424 |\n" in text
    assert "autograd nodes do not grow, from 256 to 768 tokens with sel fused_cpu.\n" in text
    screen = " ".join(" ".join(done_lines(report, PLAYBOOK, Path("reports/r"), 100)).split())
    assert "growth Time grows as T^1.0" in screen
    assert "from 1024 to 2048 tokens with sel blockwise." in screen
