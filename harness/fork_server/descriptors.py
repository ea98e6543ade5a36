"""The open files of a forked process: none but those that a started one would have."""

from __future__ import annotations

import os
import resource


def keep_only(*kept: int) -> int:
    """Close everything above the three standard streams except `kept`; returns the first of them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 1 << 30 if most == resource.RLIM_INFINITY else most)
    return kept[0] if kept else -1
