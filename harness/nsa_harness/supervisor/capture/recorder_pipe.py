"""The pipe by which NCCL's process group in torch has its flight recorder written, and the file it is written to.

A process offers it where TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set: any byte makes its watchdog write the recorder, within
about a second.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from nsa_harness.core.evidence.flight import MAX_BYTES
from nsa_harness.supervisor.capture.containers import path_of

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # a prefix; the first one goes before
_DEFAULTS = (".cache/torch/comm_lib_trace_rank_", ".cache/torch/nccl_trace_rank_")  # in HOME
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"
_SETTLES_S = 0.05


def trigger(pid: int, rank: int, environment: Mapping[str, str]) -> str | None:
    """Has the recorder written; the path of the pipe, as the process calls it, or None where it offers none.

    Raises OSError where it does and nobody reads there.
    """
    stem = environment.get(_PIPE)
    if not stem:
        return None
    name = f"{stem}{rank}.pipe"
    try:
        pipe = os.open(path_of(pid, name), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return None
        os.write(pipe, b"1\n")
    finally:
        os.close(pipe)
    return name


def written(pid: int, rank: int, environment: Mapping[str, str], since_ns: int, limit_s: float) -> bytes:
    """The recorder as it was written after `since_ns`, waited for. Raises OSError, TimeoutError among them.

    `since_ns`: by the wall clock, as file times are.
    """
    prefix = next((environment[name] for name in _FILES if environment.get(name)), None)
    home = environment.get("HOME", "/")
    names = [prefix] if prefix else [*(os.path.join(home, name) for name in _DEFAULTS), _OLD_DEFAULT]
    files = [path_of(pid, f"{name}{rank}") for name in names]
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for file in files:
            if _is_whole(file, since_ns):
                with file.open("rb") as dump:
                    return dump.read(MAX_BYTES + 1)
        time.sleep(_SETTLES_S)
    raise TimeoutError(f"no {names[0]}{rank} was written within {limit_s:.1f} s")


def _is_whole(file: Path, since_ns: int) -> bool:
    """A plain file that was written since, and for a moment no more."""
    try:
        seen = file.lstat()
    except OSError:
        return False
    quiet = time.time_ns() - seen.st_mtime_ns > _SETTLES_S * 1e9
    return stat.S_ISREG(seen.st_mode) and seen.st_size > 0 and seen.st_mtime_ns >= since_ns and quiet
