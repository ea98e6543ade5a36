"""Facts about this machine and a run's versions. Never imports torch and never raises: unknown facts are absent."""

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

_ANSWER_LIMIT_S = 5.0


def machine_facts() -> MachineFacts:
    cpus = len(os.sched_getaffinity(0))  # the CPUs of this process; a container or a batch system may limit them
    return MachineFacts(host=socket.gethostname(), cpus=cpus, gpus=_gpus(), torch=package_version("torch"))


def visible_gpus(chosen: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES makes visible.

    CUDA takes devices up to the first index that does not exist. UUIDs are not checked.
    """
    if chosen is None or not names:
        return names
    seen: list[str] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word in ("", "-1") or (word.isdigit() and int(word) >= len(names)):
            break
        seen.append(names[int(word)] if word.isdigit() else word)
    return tuple(seen)


def memory_bytes() -> tuple[int | None, int | None]:
    """Return the machine's memory and the memory available to new processes; None for unknown."""
    import psutil  # here, so that a single run starts sooner

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError):
        return None, None
    return int(memory.total), int(memory.available)


def device_words(devices: Sequence[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES value for these of this process's devices."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return ",".join(visible[device] if device < len(visible) else str(device) for device in devices)


def _gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that a rank would see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.split(",")[0].strip() in ("", "-1"):
        return ()  # without asking
    listed = _answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    return visible_gpus(chosen, tuple(line.strip() for line in listed.splitlines() if line.strip()))


_ALLOWED = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "TORCH_BACKEND", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "triton", "flash-attn", "py-spy", "psutil", "nvidia-ml-py")
_MAX_DIFF = 20_000


def describe(spec: RunSpec, facts: MachineFacts, *, git_diff: bool) -> dict[str, Any]:
    """Return the content of env.json: declared variables and an allow-list, since a shell's environment has secrets.

    `git_diff`: with what is not committed, which may hold anything.
    """
    where = Path(spec.cwd) if spec.cwd else Path.cwd()
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
        "git": _git(where, with_diff=git_diff),
    }


# The oldest supported torch has no wheels for CUDA 11.
_CUDA_WHEELS = ("cu13", "cu12")
_TORCH_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)


@cache
def _cuda() -> dict[str, str | None]:
    """Return the versions of CUDA, driver, NCCL and cuDNN, without importing torch or initialising a GPU.

    NCCL and cuDNN are read from the wheels that torch requires; None if torch contains its own build of them.
    """
    return {
        "cuda": _torch_cuda(),
        "driver": next(iter((_answer(*_DRIVER) or "").splitlines()), None) or None,
        "nccl": next(filter(None, (package_version(f"nvidia-nccl-{wheel}") for wheel in _CUDA_WHEELS)), None),
        "cudnn": next(filter(None, (package_version(f"nvidia-cudnn-{wheel}") for wheel in _CUDA_WHEELS)), None),
    }


_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _torch_cuda() -> str | None:
    """Return the CUDA version in torch/version.py, or None without torch or CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        said = _TORCH_CUDA.search(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said[1] if said else None


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(where: Path, *, with_diff: bool) -> dict[str, str | bool | None] | None:
    """Return branch and commit of the checkout around the working directory, and the changed files."""
    commit = _answer("git", "rev-parse", "HEAD", where=where)
    if commit is None:
        return None
    diff = _answer("git", "diff", "HEAD", "--no-color", "--no-ext-diff", where=where) if with_diff else None
    status = _answer("git", "status", "--short", where=where)
    return {
        "commit": commit,
        "root": _answer("git", "rev-parse", "--show-toplevel", where=where),
        "branch": _answer("git", "rev-parse", "--abbrev-ref", "HEAD", where=where),
        "dirty": None if status is None else bool(status),
        "status": status,
        "diff": diff if diff is None or len(diff) <= _MAX_DIFF else diff[:_MAX_DIFF] + "\n(cut)",
    }


def _answer(*command: str, where: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command,
            cwd=where,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
