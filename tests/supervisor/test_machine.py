"""What the machine is, asked without torch and without ever failing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_harness.supervisor.launch.machine import machine_facts


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake nvidia-smi, first on PATH."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nprintf 'NVIDIA A100\\nNVIDIA H200\\n'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return path


def test_the_gpus_are_those_that_nvidia_smi_lists(nvidia_smi: Path) -> None:
    assert nvidia_smi.exists()
    assert machine_facts().gpus == ("NVIDIA A100", "NVIDIA H200")


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("1", ("NVIDIA H200",)),
        ("1,0", ("NVIDIA H200", "NVIDIA A100")),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("NVIDIA A100",)),
        ("GPU-1234", ("GPU-1234",)),
    ],
)
@pytest.mark.usefixtures("nvidia_smi")
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_facts().gpus == gpus


def test_a_driver_that_fails_counts_as_no_gpu(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine_facts().gpus == ()


def test_no_driver_counts_as_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = machine_facts()
    assert facts.gpus == ()
    assert facts.cpus >= 1


def test_asking_does_not_import_torch() -> None:
    code = (
        "import sys; from nsa_harness.supervisor.launch.machine import machine_facts; machine_facts();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
