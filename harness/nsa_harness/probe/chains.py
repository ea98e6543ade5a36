"""Caches call stacks, reduced to the lines in the program's own code."""

from __future__ import annotations

import zlib
from typing import Any

from .places import is_installed, place_text
from .status_file import StatusFileWriter

FRAMES_LIMIT = 64  # innermost frames of a stack that are read; this bounds the cost of a deep recursion
CHAINS_LIMIT = 4096
RECENT_LIMIT = 8  # latest call paths per calling instruction; they are compared before the table is searched


class CallPath:
    """A known call stack, with the indices under which the status file stores its lines."""

    __slots__ = ("frames", "hash", "node", "place")

    def __init__(self, place: int, node: int, lines_hash: int, frames: list[tuple[Any, int]]) -> None:
        self.place = place  # string-table index of the innermost line outside of torch and the harness
        self.node = node  # node number of the program's own lines
        self.hash = lines_hash
        # (code, instruction) of every frame, innermost first. The references keep each code object alive, so no other
        # code object can get its address.
        self.frames = frames


class Chains:
    """A cache of call stacks, in which finding a cached call stack costs about 0.07 us per frame."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._recent: dict[int, list[CallPath]] = {}  # key: innermost instruction; latest first
        self._chains: dict[tuple[int, ...], CallPath] = {}  # key: the codes' addresses and the instructions

    def find(self, frame: Any) -> CallPath:
        """Return the call stack that ends in `frame`, after adding it to the cache if necessary."""
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

    def _find_or_build(self, frame: Any) -> CallPath:
        """Return the call stack that ends in `frame`, building it if it is not in the cache yet."""
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

    def _build(self, frame: Any, frames: list[tuple[Any, int]]) -> CallPath:
        """Write the lines of a new call stack to the status file, and return the new call stack."""
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
        return CallPath(place, node, zlib.crc32("\n".join(lines).encode("utf-8", "replace")), frames)
