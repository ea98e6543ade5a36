"""The node around a run: its GPUs, its memory, and who sent which signal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment, as nvidia-smi says; None = it does not say."""

    index: int
    name: str
    utilisation: float | None  # 0..1
    used_bytes: int | None
    total_bytes: int | None
    ecc_errors: int | None  # uncorrected, since the driver was loaded
    pids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SentSignal:
    """A signal that somebody is known to have sent to a process of the run."""

    pid: int
    rank: int | None  # None = the launcher, or a child of a rank
    signal: str  # "SIGTERM"
    sender: str  # "harness", "torchrun", "kernel (out of memory)"
    at_s: float | None  # None = the sender does not say when


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the node while the run was watched; None = not readable."""

    total_bytes: int | None
    available_bytes: int | None  # at the end
    limit_bytes: int | None  # the smallest limit of the control groups around the run
    used_bytes: int | None  # of that group, at the end
    oom_kills: int | None  # processes that the kernel killed in those groups since the launch
    killed: tuple[str, ...]  # what the kernel's log says about each: "Out of memory: Killed process 71 (python) ..."
