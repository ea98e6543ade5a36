"""The node's memory around a run: limits, what was left at the end, and whom the kernel killed for want of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from harness.core.observed.kernel_log import killed_since
from harness.core.observed.node import HostMemory
from harness.supervisor.sources.cgroup import GroupMemory, group_memory

_KMSG = Path("/dev/kmsg")
_KMSG_LIMIT_S = 0.3
_MAX_RECORDS = 20_000
_MAX_KILLED = 16


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """What was so at the launch; `ended` tells what has changed."""

    began_ns: int  # CLOCK_MONOTONIC, which is what the kernel's log counts in as long as the machine does not sleep
    before: GroupMemory

    def ended(self, kmsg: Path = _KMSG) -> HostMemory:
        now, host = group_memory(os.getpid()), _meminfo()
        counted = None not in (now.oom_kills, self.before.oom_kills)
        return HostMemory(
            total_bytes=host.get("MemTotal"),
            available_bytes=host.get("MemAvailable"),
            limit_bytes=now.limit_bytes,
            used_bytes=now.used_bytes,
            oom_kills=(now.oom_kills or 0) - (self.before.oom_kills or 0) if counted else None,
            killed=tuple(islice(killed_since(_records(kmsg), self.began_ns // 1000), _MAX_KILLED)),
        )


def watch_memory() -> MemoryWatch:
    """From now on. The run lives in the control groups of this process."""
    return MemoryWatch(began_ns=time.monotonic_ns(), before=group_memory(os.getpid()))


def _meminfo(file: Path = Path("/proc/meminfo")) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {word[0].rstrip(":"): int(word[1]) * 1024 for word in words if len(word) == 3 and word[1].isdigit()}


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
