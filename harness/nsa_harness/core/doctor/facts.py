"""What `doctor` measures, and the lines it says, as values; no judgement here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    OK = "ok"
    WARN = "warn"  # runs work; something will be slower, coarser or surprising
    MISSING = "missing"  # an optional thing that is not there
    BROKEN = "broken"  # a run cannot work, or evidence will be lost


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    name: str
    state: CheckState
    fact: str
    advice: str | None = None  # what to do; None only where all is well


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A question without an answer, and why."""

    why: str


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    version: str
    probe_trouble: str | None  # why the probe does not get into a child process


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    version: str
    cuda: str | None  # the CUDA version torch was built with
    devices: int  # GPUs that torch can use
    gloo: bool
    nccl: str | None  # its version; None where torch was built without it
    torchrun_trouble: str | None


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What nvidia-smi lists, and what a rank would see of it."""

    installed: tuple[str, ...] | None  # None where there is no nvidia-smi
    visible: tuple[str, ...]
    driver: str | None
    chosen: str | None  # CUDA_VISIBLE_DEVICES
    trouble: str | None


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """An optional package: `version` None means not found, `trouble` means found and not importable."""

    version: str | None
    trouble: str | None


@dataclass(frozen=True, kw_only=True)
class PySpyFacts:
    path: str | None
    threads: int  # whose stacks it read in a child process of ours
    trouble: str | None
    ptrace_scope: int | None  # None where the kernel has no Yama


@dataclass(frozen=True, kw_only=True)
class SpaceFacts:
    """A directory that we write to."""

    path: str
    trouble: str | None  # why a file could not be written
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """None: no limit, or none that can be read."""

    processes: int | None
    processes_used: int
    open_files: int | None
    core_bytes: int | None
    core_pattern: str
    address_space_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    total_bytes: int  # of the machine, or of the control group where that is less
    available_bytes: int


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    usable: int
    quota: float | None  # cores' worth of time that the control group grants; None = no quota


@dataclass(frozen=True, kw_only=True)
class NameFacts:
    """The name that torchrun hands to the ranks as MASTER_ADDR."""

    hostname: str
    addresses: tuple[str, ...]
    bindable: tuple[str, ...]
    took_s: float  # to resolve it
    trouble: str | None


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    wanted: str | None  # GLOO_SOCKET_IFNAME
    present: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    trouble: str | None  # why a port of this machine could not be bound and reached
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    over_s: float  # how long it was watched
    backwards: int  # readings of the monotonic clock that went back
    drift_s: float  # how far wall clock and monotonic clock parted
    behind_s: float  # how far the wall clock lies behind the newest file of the harness


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    version: str | None  # what sinfo says; None where it is not installed or does not answer
    absent: tuple[str, ...]  # of sinfo, scontrol and srun
    job: str | None
    trouble: str | None


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """A directory of boards whose run has no living process."""

    path: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    python: PythonFacts
    torch: TorchFacts | Unknown
    gpu: GpuFacts
    nvml: ModuleFacts
    triton: ModuleFacts
    flash_attn: ModuleFacts
    py_spy: PySpyFacts
    shared_memory: SpaceFacts
    temporary: SpaceFacts
    reports: SpaceFacts
    limits: LimitFacts
    memory: MemoryFacts
    cores: CoreFacts
    name: NameFacts
    interface: InterfaceFacts
    ports: PortFacts
    clock: ClockFacts
    slurm: SlurmFacts
    left_over: tuple[LeftOver, ...]


def size_text(size_bytes: int) -> str:
    """ "23.9 GiB", "64 MiB", "512 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            share = size_bytes / unit
            return f"{share:.0f} {name}" if share >= 100 or share == int(share) else f"{share:.1f} {name}"
    return f"{size_bytes} B"
