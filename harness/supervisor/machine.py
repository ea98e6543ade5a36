"""What this machine is. Never imports torch and never raises: what cannot be asked counts as absent."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess

from harness.core.report import MachineFacts

_NVIDIA_SMI_LIMIT_S = 5.0


def machine_facts() -> MachineFacts:
    return MachineFacts(host=socket.gethostname(), cpus=_cpus(), gpus=_gpus(), torch=_torch())


def _cpus() -> int:
    """The cores this process may use, which a container or a batch system may have cut down."""
    return len(os.sched_getaffinity(0))


def _torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    """The names of the GPUs that a rank would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return ()
    names = _nvidia_smi()
    if visible is None or not names:
        return names
    return _visible(visible, names)


def _visible(visible: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """CUDA takes devices up to the first index that does not exist; a UUID is taken as it is."""
    chosen = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdigit() and int(word) >= len(names):
            break
        chosen.append(names[int(word)] if word.isdigit() else word)
    return tuple(chosen)


def _nvidia_smi() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
