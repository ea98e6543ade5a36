"""Reads the loops of the program that its threads sleep in, from its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.evidence.host import Process
from nsa_harness.core.evidence.loops import innermost_loop
from nsa_harness.core.evidence.stacks import is_poller, user_frame
from nsa_harness.supervisor.store.sources import text_as_launched


def with_loops(stacks: Sequence[Stack], process: Process, origin_ns: int) -> tuple[Stack, ...]:
    """The loop of each thread that sleeps; none of a file that was written after the launch."""
    launched_s = time.time() - (time.monotonic_ns() - origin_ns) / 1e9
    asleep = {task.tid for task in process.tasks if task.wakes_at_s is not None}
    return tuple(
        replace(one, loop=_loop(user.file, user.line, launched_s // 1 + 1))
        if one.tid in asleep and not is_poller(one) and (user := user_frame(one.frames))
        else one
        for one in stacks
    )


@lru_cache(maxsize=256)
def _loop(file: str, line: int, launched_s: float) -> str:
    return innermost_loop(text_as_launched(file, launched_s), line)
