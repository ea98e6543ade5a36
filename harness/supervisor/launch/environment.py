"""env.json: what the run was made of. Declared environment and an allow-list only; a shell holds secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_harness import __version__
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts

_ALLOWED = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "TORCH_BACKEND", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "triton", "flash-attn", "py-spy", "psutil", "nvidia-ml-py")
_GIT_LIMIT_S = 5.0
_MAX_DIFF = 20_000


def describe(spec: RunSpec, facts: MachineFacts) -> dict[str, Any]:
    """The content of env.json. Never raises: what cannot be asked is null."""
    where = Path(spec.cwd) if spec.cwd else Path.cwd()
    return {
        "schema": 1,
        "harness": __version__,
        "machine": asdict(facts),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"kernel": platform.release(), "arch": platform.machine()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {
            "declared": dict(spec.env),
            "inherited": {name: os.environ[name] for name in _ALLOWED if name in os.environ},
        },
        "git": _git(where),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(where: Path) -> dict[str, str | None] | None:
    """Branch, commit and what is not committed, of the checkout that holds the working directory."""
    commit = _ask_git(where, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _ask_git(where, "diff", "HEAD", "--no-color", "--no-ext-diff")
    return {
        "commit": commit,
        "branch": _ask_git(where, "rev-parse", "--abbrev-ref", "HEAD"),
        "status": _ask_git(where, "status", "--short"),
        "diff": diff if diff is None or len(diff) <= _MAX_DIFF else diff[:_MAX_DIFF] + "\n(cut)",
    }


def _ask_git(where: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=where,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
