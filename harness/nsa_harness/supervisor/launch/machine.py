"""Collects the properties of this machine and a run's software without importing torch, and without errors."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from nsa_harness import __version__
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.supervisor.storage.rundir import working_directory

_COMMAND_LIMIT_S = 5.0


def machine_facts() -> MachineFacts:
    cpus = len(os.sched_getaffinity(0))  # the CPUs of this process; a container or a batch system may limit them
    return MachineFacts(host=socket.gethostname(), cpus=cpus, gpus=_gpus(), torch=package_version("torch"))


def visible_gpus(visible_devices: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the GPUs `names` that are visible when CUDA_VISIBLE_DEVICES has the value `visible_devices`.

    `names` are the names of all GPUs. Like CUDA, ignore everything from the first index that does not exist. UUIDs are
    returned unchecked.
    """
    if visible_devices is None or not names:
        return names
    gpus: list[str] = []
    for index in (part.strip() for part in visible_devices.split(",")):
        if index in ("", "-1") or (index.isdigit() and int(index) >= len(names)):
            break
        gpus.append(names[int(index)] if index.isdigit() else index)
    return tuple(gpus)


def memory_bytes() -> tuple[int | None, int | None]:
    """Return the total and the available memory of the machine in bytes. Unknown values are None."""
    import psutil  # imported here to speed up the start of a run, which does not need it

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError):
        return None, None
    return int(memory.total), int(memory.available)


def visible_devices_value(devices: Sequence[int]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that selects devices by their numbers in this process."""
    visible = [
        device_name.strip()
        for device_name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if device_name.strip()
    ]
    return ",".join(visible[device] if device < len(visible) else str(device) for device in devices)


def _gpus() -> tuple[str, ...]:
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.split(",")[0].strip() in ("", "-1"):
        return ()  # no need to run nvidia-smi
    output = _command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    return visible_gpus(visible_devices, tuple(line.strip() for line in output.splitlines() if line.strip()))


_ALLOWED = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "TORCH_BACKEND", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "triton", "flash-attn", "py-spy", "psutil", "nvidia-ml-py")
_MAX_DIFF = 20_000


def describe(spec: RunSpec, facts: MachineFacts, *, git_diff: bool) -> dict[str, Any]:
    """Return the content of env.json. Variables and (unless `git_diff`) changes that may be secret are left out."""
    where = Path(spec.cwd) if spec.cwd else working_directory()
    return {
        "schema": 1,
        "harness": __version__,
        "machine": asdict(facts),
        "python": {"version": platform.python_version(), "executable": sys.executable, "program": spec.python},
        "system": {"kernel": platform.release(), "arch": platform.machine()},
        "packages": {name: package_version(name) for name in _PACKAGES},
        "cuda": _cuda(),
        "environment": {
            "declared": dict(spec.env),
            "inherited": {name: os.environ[name] for name in _ALLOWED if name in os.environ},
        },
        "git": _git(where, with_diff=git_diff) if where else None,
    }


# CUDA versions in the names of NVIDIA's wheels. The oldest supported torch has no wheels for CUDA 11.
_CUDA_WHEELS = ("cu13", "cu12")
_TORCH_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)


@cache
def _cuda() -> dict[str, str | None]:
    """Return the installed versions of CUDA, the driver, NCCL and cuDNN, without importing torch."""
    cuda = _torch_cuda()
    wheels = sorted(_CUDA_WHEELS, key=lambda wheel: wheel != f"cu{(cuda or '').partition('.')[0]}")  # torch's own first
    return {
        "cuda": cuda,
        "driver": next(iter((_command_output(*_DRIVER) or "").splitlines()), None) or None,
        "nccl": next(filter(None, (package_version(f"nvidia-nccl-{wheel}") for wheel in wheels)), None),
        "cudnn": next(filter(None, (package_version(f"nvidia-cudnn-{wheel}") for wheel in wheels)), None),
    }


_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _torch_cuda() -> str | None:
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return None
    try:
        match = _TORCH_CUDA.search(Path(torch_spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return match[1] if match else None


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(where: Path, *, with_diff: bool) -> dict[str, str | bool | None] | None:
    """Return the commit, branch and changed files of the git checkout at `where`, or None if there is none."""
    commit = _command_output("git", "rev-parse", "HEAD", where=where)
    if commit is None:
        return None
    diff = _command_output("git", "diff", "HEAD", "--no-color", "--no-ext-diff", where=where) if with_diff else None
    status = _command_output("git", "status", "--short", where=where)
    return {
        "commit": commit,
        "root": _command_output("git", "rev-parse", "--show-toplevel", where=where),
        "branch": _command_output("git", "rev-parse", "--abbrev-ref", "HEAD", where=where),
        "dirty": None if status is None else bool(status),
        "status": status,
        "diff": diff if diff is None or len(diff) <= _MAX_DIFF else diff[:_MAX_DIFF] + "\n(cut)",
    }


def _command_output(*command: str, where: Path | None = None) -> str | None:
    try:
        process = subprocess.run(
            command,
            cwd=where,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.decode(errors="replace").strip()
