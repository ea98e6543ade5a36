"""The training program as a program: alone, under torchrun, and when it cannot run."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Alone, Program

import nsa_attention
from nsa_attention.data import Batches, shipped_text


def losses(directory: Path) -> list[float]:
    with (directory / "out" / "training.csv").open(encoding="utf-8", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_one_ddp_step_of_two_ranks_with_every_trace(two_ranks: Program, tmp_path: Path) -> None:
    done = two_ranks(
        *("--wrapper", "ddp", "--trace-grads", "--trace-buckets", "--trace-module-bwd", "--steps", "3"),
        *("--freeze", "blocks.2.attn.gate_mlp.bias", "--bucket-cap-mb", "0.5"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("[GRAD-TRACE] after_backward_step1 arrived=109 missing=1") == 2
    assert lines.count("  - MISSING: blocks.2.attn.gate_mlp.bias") == 6
    for rank in (0, 1):
        found = [re.fullmatch(rf"\[DDP\] rank={rank} bucket_elems=(\d+) dtype=torch.float32", line) for line in lines]
        sizes = [int(match[1]) for match in found if match]
        trainable = 900128 - 24  # every parameter but the frozen bias
        assert sizes[0] == trainable  # DDP starts with one bucket and orders its own after the first step
        assert len(sizes) > 2
        assert sum(sizes[1:]) == trainable
        orders = (tmp_path / "out" / f"grad_order_rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        ready = [json.loads(line)["buckets"] for line in orders]
        assert [sum(one["parameters"] for one in buckets) for buckets in ready[:2]] == [109, 109]
        assert [one["bucket"] for one in ready[1]] == list(range(len(sizes) - 1))
    assert lines.count("[MODULE-BWD] step=1 blocks.3.attn") == 2
    assert len([line for line in lines if line.startswith("step ")]) == 3
    assert "batch rank=1 input=(2, 256) target=(2, 256) torch.int64" in lines


@pytest.mark.slow
def test_averaging_by_hand_equals_ddp_and_ranks_see_different_data(two_ranks: Program, tmp_path: Path) -> None:
    common = ("--layers", "1", "--steps", "3", "--dtype", "float64", "--accumulate", "2")
    assert two_ranks(*common, "--wrapper", "ddp").returncode == 0
    by_ddp = losses(tmp_path)
    beats = [
        json.loads((tmp_path / "out" / f"heartbeat_rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        for rank in (0, 1)
    ]
    assert beats[0]["loss"] != beats[1]["loss"]
    mean = (beats[0]["loss"] + beats[1]["loss"]) / 2
    assert beats[0]["mean_loss"] == beats[1]["mean_loss"] == pytest.approx(mean, rel=1e-6)
    assert by_ddp[-1] == pytest.approx(mean, rel=1e-5)
    assert [beat["backend"] for beat in beats] == ["gloo", "gloo"]
    (tmp_path / "out" / "training.csv").unlink()
    assert two_ranks(*common, "--wrapper", "manual").returncode == 0
    assert losses(tmp_path) == by_ddp


@pytest.mark.parametrize(
    "options",
    [
        ("--attention", "vanilla"),
        ("--attention", "stock"),
        ("--branch", "cmp+win", "--gc", "all", "--gc-mode", "reentrant"),
        ("--wrapper", "ddp", "--static-graph", "--gc", "0:1"),
        ("--phase", "forward", "--dtype", "bfloat16"),
        ("--phase", "backward", "--find-unused-parameters", "--wrapper", "ddp"),
        ("--phase", "data", "--data", "text"),
    ],
    ids=" ".join,
)
def test_a_plain_launch_runs_every_kind_of_step(alone: Alone, tmp_path: Path, options: tuple[str, ...]) -> None:
    status, output, _ = alone(*options, "--layers", "2", "--steps", "2")
    assert status == 0
    assert len([line for line in output.splitlines() if line.startswith("step ")]) == 2
    assert len((tmp_path / "out" / "heartbeat_rank0.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("attention", ["nsa", "stock"])
def test_the_mean_of_all_logits_is_a_loss_that_reaches_every_parameter(alone: Alone, attention: str) -> None:
    """The reproduction of the third report, and its control."""
    status, output, _ = alone(
        "--shape", "repro", "--layers", "2", "--attention", attention, "--loss", "mean", "--trace-grads"
    )
    assert status == 0
    (line,) = [line for line in output.splitlines() if line.startswith("[GRAD-TRACE]")]
    assert line.endswith(" missing=0")
    (step,) = [line for line in output.splitlines() if line.startswith("step 1 ")]
    assert abs(float(step.split()[3])) < 0.1 < float(step.split()[5])  # near 0, with a gradient


def test_a_step_that_raises_leaves_no_process_group(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Batches, "fetch", broken)
    with pytest.raises(RuntimeError, match="planted"):
        alone("--wrapper", "ddp", "--layers", "1")
    assert not torch.distributed.is_initialized()


def test_a_users_own_nsa_package_does_not_shadow_ours(program: Program, tmp_path: Path) -> None:
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "__init__.py").write_text("raise SystemExit('the wrong nsa')\n", encoding="utf-8")
    done = program("--phase", "data")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda"), "--device cuda: local rank 0 needs its own GPU and this machine has 0; "),
        (("--device", "cpu", "--backend", "nccl", "--ddp", "1"), "--backend nccl: nccl moves GPU memory only"),
        (("--device", "cpu", "--impl", "flash"), "--impl flash: flash-attn runs on CUDA only and the device is cpu; "),
        (("--freeze", "nothing"), '--freeze: no parameter matches "nothing"; parameter names look like embed.weight'),
        (("--batch", "0"), '--batch: expected a whole number of at least 1, got "0"'),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_status_2(alone: Alone, options: tuple[str, ...], message: str) -> None:
    if options == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    status, _, error = alone(*options)
    assert status == 2
    assert error.startswith(f"nsa.train: error: {message}")


def test_a_data_file_that_is_too_short_is_an_error(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    status, _, error = alone("--data", "short.txt")
    assert status == 2
    assert error == "nsa.train: error: --data short.txt: 9 bytes are too few for sequences of 256 tokens\n"


def test_the_shipped_text_is_long_enough_to_learn_from() -> None:
    text = shipped_text()
    assert len(text) > 100_000
    text.decode("ascii")


@pytest.mark.slow
def test_sixty_steps_of_text_on_two_ranks_learn(two_ranks: Program, tmp_path: Path) -> None:
    done = two_ranks("--wrapper", "ddp", "--data", "text", "--steps", "60")
    assert done.returncode == 0, done.stderr
    curve = losses(tmp_path)
    assert curve[0] > 5.3
    assert sum(curve[-5:]) / 5 < 3.0


def test_a_step_is_told_in_its_parts(alone: Alone, tmp_path: Path) -> None:
    assert alone("--layers", "1", "--steps", "2", "--accumulate", "2")[0] == 0
    with (tmp_path / "out" / "training.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        parts = [float(row[f"{part}_s"]) for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= float(row["seconds"])
        assert row["peak_gpu_bytes"] == ""  # none here, and no number is made up


def test_the_profile_names_the_operators_that_took_most_memory(alone: Alone, tmp_path: Path) -> None:
    assert alone("--layers", "1", "--steps", "3", "--profile-memory")[0] == 0
    (table,) = (tmp_path / "out").glob("mem_profile_*")
    assert table.name == "mem_profile_rank0_step2.txt"
    text = table.read_text(encoding="utf-8")
    assert "Self CPU Mem" in text
    assert "Input Shapes" in text
    assert "aten::" in text


def test_anomaly_detection_turns_a_nan_in_backward_into_an_error(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_attention.train.loss_of", lambda logits, *_: (logits.sum() * 0).sqrt())
    assert alone("--layers", "1")[0] == 0
    with pytest.raises(RuntimeError, match="returned nan values"):
        alone("--layers", "1", "--detect-anomaly")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package below another one, as an installation has it."""
    home = tmp_path_factory.mktemp("elsewhere")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(nsa_attention.__path__[0]), home / "other_package" / "nsa_attention", ignore=ignored)
    (home / "other_package" / "__init__.py").touch()
    return home


STEP = ("--shape=ci", "--layers=1", "--steps=1", "--device=cpu", "--data=text")


@pytest.mark.parametrize(
    "command", [("-m", "other_package.nsa_attention.train"), ("other_package/nsa_attention",)], ids=["module", "folder"]
)
def test_a_step_below_another_package_loads_nothing_of_ours(
    elsewhere: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    # The last import of a program, so that what it sees is what the step has loaded.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print('top-level:', any(name.split('.')[0] == 'nsa_attention' for name in"
        " sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(elsewhere)])}
    done = run_python(*command, *STEP, f"--out-dir={tmp_path / 'out'}", cwd=elsewhere, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "top-level: False"
    assert len(losses(tmp_path)) == 1
    usage = run_python(*command, "--help", cwd=elsewhere, environment=environment).stdout
    assert usage.startswith("usage: python -m other_package.nsa_attention.train ")


def test_two_copies_in_one_process_have_operators_of_their_own(elsewhere: Path, tmp_path: Path) -> None:
    # With checkpointing an operator looks for what its own layer selected.
    command = [*STEP, "--gc=all", f"--out-dir={tmp_path / 'out'}"]
    text = (
        "import nsa_attention.train, other_package.nsa_attention.train as other;"
        f" [one.main({command}) for one in (nsa_attention.train, other)]"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(elsewhere), str(Path(nsa_attention.__path__[0]).parent)]),
    }
    done = run_python("-W", "error", "-c", text, cwd=elsewhere, environment=environment)
    assert done.returncode == 0, done.stderr
    first, second = losses(tmp_path)
    assert first == second


def run_python(*words: str, cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
