"""Finds the caller chain of a call: the lines of the call stack that are in the program's own code."""

from __future__ import annotations

import zlib
from typing import Any

from .places import is_installed, place_text
from .status_file import StatusFileWriter

FRAMES_LIMIT = 64  # innermost frames of a stack that are read; this bounds the cost of a deep recursion
CHAINS_LIMIT = 4096
RECENT_LIMIT = 8  # latest call paths per calling instruction; they are compared before the table is searched


class Chain:
    """One call path: its lines in the status file, and the frames that identify it."""

    __slots__ = ("frames", "hash", "node", "place")

    def __init__(self, place: int, node: int, lines_hash: int, frames: list[tuple[Any, int]]) -> None:
        self.place = place  # string number of the innermost line outside of torch and the harness
        self.node = node  # node number of the program's own lines
        self.hash = lines_hash
        # (code, instruction) of every frame, innermost first. The references keep each code object alive, so no other
        # code object can get its address.
        self.frames = frames


class Chains:
    """A cache of call paths. Recognising a call path costs about 0.07 us per frame."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._recent: dict[int, list[Chain]] = {}  # key: innermost instruction; latest first
        self._chains: dict[tuple[int, ...], Chain] = {}  # key: the codes' addresses and the instructions

    def find(self, frame: Any) -> Chain:
        """Return the call path to `frame`. All frames are compared, so different paths are never confused."""
        for chain in self._recent.get(frame.f_lasti, ()):
            caller = frame
            try:
                for code, instruction in chain.frames:
                    if caller.f_code is not code or caller.f_lasti != instruction:
                        break
                    caller = caller.f_back
                else:
                    if caller is None or len(chain.frames) == FRAMES_LIMIT:
                        return chain
            except AttributeError:  # this stack has fewer frames
                continue
        return self._find_or_build(frame)

    def _find_or_build(self, frame: Any) -> Chain:
        """Return the call path to `frame` from the table, or add it. It becomes the latest path of its instruction.

        `of` calls this method if none of the latest call paths of this instruction matches. Both caches are bounded.
        """
        frames: list[tuple[Any, int]] = []
        caller = frame
        while caller is not None and len(frames) < FRAMES_LIMIT:
            frames.append((caller.f_code, caller.f_lasti))
            caller = caller.f_back
        key = tuple(number for code, instruction in frames for number in (id(code), instruction))
        chain = self._chains.get(key)
        if chain is None:
            chain = self._build(frame, frames)
            if len(self._chains) >= CHAINS_LIMIT:
                self._chains.clear()
                self._recent.clear()
            self._chains[key] = chain
        self._recent[frame.f_lasti] = [chain, *self._recent.get(frame.f_lasti, ())][:RECENT_LIMIT]
        return chain

    def _build(self, frame: Any, frames: list[tuple[Any, int]]) -> Chain:
        """Return a new call path, after writing its lines to the status file."""
        status_file, place, node, lines = self._status_file, 0, 0, []
        for code, _ in frames:
            if not code.co_filename.startswith(self._foreign):
                text = place_text(code.co_filename, frame.f_lineno, code.co_name)
                place = place or status_file.string_number(text)
                if not is_installed(code.co_filename):
                    lines.append(text)
            frame = frame.f_back
        for text in reversed(lines):
            node = status_file.node_number(status_file.string_number(text), node)
            if not node:
                break
        return Chain(place, node, zlib.crc32("\n".join(lines).encode("utf-8", "replace")), frames)
