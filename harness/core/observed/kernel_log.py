"""The kernel's log, what it says of processes killed for want of memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_RECORD = re.compile(r"^\d+,\d+,(\d+),[^;]*;(.*)")  # level, number, microseconds since boot, flags; text
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+).*")
_CLOCK_SLACK_US = 2_000_000  # the log's clock and CLOCK_MONOTONIC drift apart by a little
_MAX_LINE = 300


def killed_since(records: Iterable[str], began_us: int) -> Iterator[str]:
    """What records of /dev/kmsg say of the processes that the kernel killed since; times since boot."""
    for record in records:
        parts = _RECORD.match(record)
        killed = _KILLED.search(parts[2]) if parts else None
        if parts and killed and int(parts[1]) >= began_us - _CLOCK_SLACK_US:
            yield killed[0][:_MAX_LINE]


def killed_pids(lines: Iterable[str]) -> Iterator[int]:
    return (int(killed[1]) for line in lines if (killed := _KILLED.search(line)))
