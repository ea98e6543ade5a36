"""Caller chains: which of the program's own lines led to a call."""

from __future__ import annotations

import zlib
from typing import Any

from .board import BoardWriter
from .places import is_installed, place_text

FRAMES_LIMIT = 64  # of a stack, innermost first: an endless recursion says no more with more of them
KNOWN_LIMIT = 4096


class Chains:
    """Which lines led to a call. One that is known costs a walk over its frames and one look-up."""

    def __init__(self, board: BoardWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        # The code objects stay with what is known of them: as long as they live, no other has their identity.
        self._known: dict[tuple[int, ...], tuple[tuple[int, int, int], list[Any]]] = {}

    def of(self, frame: Any) -> tuple[int, int, int]:
        """(place, chain, hash of the chain): the innermost line that is neither torch's nor ours, the program's own."""
        key: list[int] = []
        add, at = key.append, frame
        for _ in range(FRAMES_LIMIT):
            if at is None:
                break
            add(id(at.f_code))
            add(at.f_lasti)
            at = at.f_back
        known = self._known.get(tuple(key))
        return known[0] if known is not None else self._learn(tuple(key), frame)

    def _learn(self, key: tuple[int, ...], frame: Any) -> tuple[int, int, int]:
        board, place, node, codes, lines = self._board, 0, 0, [], []
        for _ in range(len(key) // 2):
            code = frame.f_code
            codes.append(code)
            if not code.co_filename.startswith(self._foreign):
                text = place_text(code.co_filename, frame.f_lineno, code.co_name)
                place = place or board.string(text)
                if not is_installed(code.co_filename):
                    lines.append(text)
            frame = frame.f_back
        for text in reversed(lines):
            node = board.node(board.string(text), node)
            if not node:
                break
        if len(self._known) >= KNOWN_LIMIT:
            self._known.clear()
        found = place, node, zlib.crc32("\n".join(lines).encode("utf-8", "replace"))
        self._known[key] = found, codes
        return found
