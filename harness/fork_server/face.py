"""What the kernel shows of this process: its command line and environment, in the memory that exec gave it.

A forked process keeps its parent's, and whoever looks from outside (ps, py-spy, the sweep by the tag) would take it for
the server. So the server is started with room to write in: its last argument and its last variable are long and empty.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# Fields of /proc/self/stat after the command's closing bracket: start and end of the arguments, of the environment.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
_FIRST = b"RANK="


class Face:
    """Made once, before anything is changed; every fork of the process may show another face."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(") ")[2].split()
        self._words = _region(fields[_ARGUMENTS])
        start, end = _region(fields[_ENVIRONMENT])
        self._given: list[tuple[int, bytes]] = []
        for entry in ctypes.string_at(start, end - start).removesuffix(b"\0").split(b"\0"):
            self._given.append((start, entry))
            start += len(entry) + 1
        at, room = self._given.pop()
        self._room = (at, at + len(room))
        self.name_of_room = os.fsdecode(room.partition(b"=")[0])

    def show(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises ValueError where there is not room enough."""
        new = dict.fromkeys(os.fsencode(f"{name}={value}") for name, value in environment.items())
        _write(self._words, [os.fsencode(word) for word in words])
        for at, entry in self._given:
            # What stays the same stays where it is: a library may have kept the pointer that getenv gave it.
            kept = entry in new
            new.pop(entry, None)
            ctypes.memmove(at, entry if kept else bytes(len(entry)), len(entry))
        _write(self._room, sorted(new, key=lambda entry: not entry.startswith(_FIRST)))


def _region(fields: Sequence[str]) -> tuple[int, int]:
    start, end = fields
    return int(start), int(end)


def _write(region: tuple[int, int], entries: Sequence[bytes]) -> None:
    """The first byte last: who reads meanwhile finds a rank whose number is complete, or none."""
    start, end = region
    text = b"\0".join(entries)
    if len(text) >= end - start:
        raise ValueError(f"{len(text)} bytes of arguments or environment, and room for {end - start - 1}")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start + 1, text[1:], len(text[1:]))
    ctypes.memmove(start, text[:1], len(text[:1]))
