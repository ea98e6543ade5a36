"""What this machine is. Never imports torch and never raises: what cannot be asked counts as absent."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
from collections.abc import Sequence

from nsa_harness.core.report import MachineFacts

_NVIDIA_SMI_LIMIT_S = 5.0


def machine_facts() -> MachineFacts:
    return MachineFacts(host=socket.gethostname(), cpus=_cpus(), gpus=_gpus(), torch=_torch())


def visible_gpus(chosen: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the GPUs of this machine, those that CUDA_VISIBLE_DEVICES leaves.

    CUDA takes devices up to the first index that does not exist; a UUID is taken as it is.
    """
    if chosen is None or not names:
        return names
    seen: list[str] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word in ("", "-1") or (word.isdigit() and int(word) >= len(names)):
            break
        seen.append(names[int(word)] if word.isdigit() else word)
    return tuple(seen)


def available_bytes() -> int | None:
    """Memory that new processes can have; None where the system does not say."""
    import psutil  # here alone, so that a single run starts sooner

    try:
        return int(psutil.virtual_memory().available)
    except (OSError, RuntimeError):
        return None


def device_words(devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these of the devices that this process sees."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return ",".join(visible[device] if device < len(visible) else str(device) for device in devices)


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
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.split(",")[0].strip() in ("", "-1"):
        return ()  # without asking
    return visible_gpus(chosen, _nvidia_smi())


def _nvidia_smi() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
