"""How much memory of this process is its own."""

from __future__ import annotations

import os


def anonymous_bytes() -> int | None:
    """Resident memory without files and shared segments: a mapped dataset that is read grows and is no leak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
