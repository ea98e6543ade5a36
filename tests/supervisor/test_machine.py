"""What the machine is, asked without torch and without ever failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import spec

from nsa_harness.supervisor.launch.machine import describe, machine_facts


def test_a_working_directory_that_was_deleted_is_no_git_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert describe(spec(), machine_facts(), git_diff=False)["git"] is None


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


_DESCRIBE = """
import json, sys
from nsa_harness.supervisor.launch import machine
print(json.dumps([machine._cuda(), "torch" in sys.modules]))
"""


def cuda_of(site: Path, nvidia_smi: Path) -> tuple[dict[str, str | None], bool]:
    """What env.json says in a process that finds torch and its wheels in `site` first."""
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{nvidia_smi.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", _DESCRIBE], env=env, capture_output=True, text=True, check=True)
    versions, imported = json.loads(done.stdout)
    return versions, imported


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.9'", "cuda = '12.9'"])
def test_the_versions_of_cuda_driver_nccl_and_cudnn_are_read_without_torch(
    tmp_path: Path, nvidia_smi: Path, line: str
) -> None:
    nvidia_smi.write_text("#!/bin/sh\nprintf '580.65.06\\n580.65.06\\n'\n")
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.13.0+cu129'\n{line}\n")
    wheels = (("nccl", "cu12", "2.27.5"), ("cudnn", "cu12", "9.10.2.21"), ("nccl", "cu13", "2.28.9"))
    for name, cuda, version in wheels:  # those of another CUDA than torch's may be installed too
        (site / f"nvidia_{name}_{cuda}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: nvidia-{name}-{cuda}\nVersion: {version}\n"
        (site / f"nvidia_{name}_{cuda}-{version}.dist-info" / "METADATA").write_text(metadata)
    versions = {"cuda": "12.9", "driver": "580.65.06", "nccl": "2.27.5", "cudnn": "9.10.2.21"}
    assert cuda_of(site, nvidia_smi) == (versions, False)


def test_what_a_machine_does_not_have_has_no_version(tmp_path: Path, nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    versions, imported = cuda_of(tmp_path / "site", nvidia_smi)
    assert (versions["cuda"], versions["driver"], imported) == (None, None, False)


def test_asking_does_not_import_torch() -> None:
    code = (
        "import sys; from nsa_harness.supervisor.launch.machine import machine_facts; machine_facts();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
