"""The node around a run: memory limits and what was left, whom the kernel killed, and the state of the GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from nsa_harness.core.evidence.host import (
    GPU_FIELDS,
    PROCESS_FIELDS,
    Gpu,
    HostMemory,
    killed_since,
    parse_gpus,
)
from nsa_harness.supervisor.capture.cgroup import GroupMemory, group_memory
from nsa_harness.supervisor.capture.commands import answer_of
from nsa_harness.supervisor.launch.machine import memory_bytes

_KMSG = Path("/dev/kmsg")
_KMSG_LIMIT_S = 0.3
_MAX_RECORDS = 20_000
_MAX_KILLED = 16


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """What is so now, at the launch; `ended` tells what has changed. The run lives in our own control groups."""

    # CLOCK_MONOTONIC, which is what the kernel's log counts in as long as the machine does not sleep.
    began_ns: int = field(default_factory=time.monotonic_ns)
    before: GroupMemory = field(default_factory=lambda: group_memory(os.getpid()))

    def ended(self, kmsg: Path = _KMSG) -> HostMemory:
        now, (total_bytes, available_bytes) = group_memory(os.getpid()), memory_bytes()
        counted = None not in (now.oom_kills, self.before.oom_kills)
        return HostMemory(
            total_bytes=total_bytes,
            available_bytes=available_bytes,
            limit_bytes=now.limit_bytes,
            used_bytes=now.used_bytes,
            oom_kills=(now.oom_kills or 0) - (self.before.oom_kills or 0) if counted else None,
            killed=tuple(islice(killed_since(_records(kmsg), self.began_ns // 1000), _MAX_KILLED)),
        )


def _records(kmsg: Path) -> Iterator[str]:
    """What the log holds now, a record a read. It never ends by itself, so it is read without waiting."""
    try:
        log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    deadline = time.monotonic() + _KMSG_LIMIT_S
    try:
        for _ in range(_MAX_RECORDS):
            record = _next_record(log)
            if record is None or time.monotonic() > deadline:
                return
            yield from record.splitlines()
    finally:
        os.close(log)


def _next_record(log: int) -> str | None:
    try:
        return os.read(log, 8192).decode(errors="replace") or None
    except BrokenPipeError:
        return " "  # overwritten while we read; the next one follows
    except OSError:
        return None


_LIMIT_S = 2.5  # for both questions


def gpu_state(tool: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """Every GPU of the node. Raises CommandFailed where there is no answer, ValueError for one of another form."""
    deadline = time.monotonic() + _LIMIT_S
    table = _ask(tool, "gpu", GPU_FIELDS, deadline)
    return parse_gpus(table, _ask(tool, "compute-apps", PROCESS_FIELDS, deadline))


def _ask(tool: str, what: str, fields: tuple[str, ...], deadline: float) -> str:
    query = f"--query-{what}={','.join(fields)}"
    return answer_of([tool, query, "--format=csv,noheader,nounits"], deadline - time.monotonic())
