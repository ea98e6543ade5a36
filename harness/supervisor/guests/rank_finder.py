"""Which processes below another one are ranks, as far as that can be seen from outside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.supervisor.sources import procfs

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
# Python programs that start ranks and are none, even where RANK is in their own environment.
_STARTER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_STARTER_COMMANDS = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "srun", "mpirun"})
_STARTER_WORDS = 4  # interpreter, its switches, -m, module
_SPAWNED = "multiprocessing.spawn import spawn_main"


def starts_ranks(words: Sequence[str]) -> bool:
    """The command of a launcher: `torchrun ...`, `python -P -m torch.distributed.run ...`."""
    return any(
        word in _STARTER_MODULES or os.path.basename(word) in _STARTER_COMMANDS for word in words[:_STARTER_WORDS]
    )


def is_python_command(words: Sequence[str]) -> bool:
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0])) is not None


def ranks_below(root: int) -> dict[int, int]:
    """rank -> process of the ranks at or below `root`: by RANK in their environment, else by who has loaded torch.

    Where nobody has a RANK (mp.spawn), they are numbered in the order in which they were started.
    """
    first = procfs.read_stat(root)
    below = [*([first] if first else []), *procfs.descendants(root)]
    named = _named(stat for stat in below if stat.state not in "ZX")
    return named or dict(enumerate(_with_torch(below)))


def rank_of(pid: int) -> int | None:
    """RANK in the environment of a Python program that starts none itself."""
    rank = procfs.environment(pid).get("RANK", "")
    words = command_words(pid)
    return int(rank) if rank.isdigit() and _is_python(pid, words) and not starts_ranks(words) else None


def command_words(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0") if word]


def _named(below: Iterable[procfs.Stat]) -> dict[int, int]:
    """The topmost process of each rank: a rank's children inherit its environment."""
    found: dict[int, int] = {}
    inside: set[int] = set()
    for stat in below:
        rank = None if stat.parent in inside else rank_of(stat.pid)
        if rank is not None:
            found.setdefault(rank, stat.pid)
        if rank is not None or stat.parent in inside:
            inside.add(stat.pid)
    return found


def _with_torch(below: Sequence[procfs.Stat]) -> list[int]:
    """The topmost programs that train; where those have spawned others by multiprocessing, the spawned ones."""
    training = {stat.pid: stat for stat in below if loads_torch(stat.pid) and not starts_ranks(command_words(stat.pid))}
    top = [stat for stat in training.values() if stat.parent not in training]
    spawned = [stat for stat in training.values() if _SPAWNED in " ".join(command_words(stat.pid))]
    ranks = [stat for stat in spawned if stat.parent in {one.pid for one in top}] or top
    return [stat.pid for stat in sorted(ranks, key=lambda stat: (stat.started_ticks, stat.pid))]


def loads_torch(pid: int) -> bool:
    try:
        return "/libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def _is_python(pid: int, words: Sequence[str]) -> bool:
    """By its program file; by its command where that cannot be read."""
    try:
        return _PYTHON.fullmatch(os.path.basename(os.readlink(f"/proc/{pid}/exe"))) is not None
    except OSError:
        return is_python_command(words)
