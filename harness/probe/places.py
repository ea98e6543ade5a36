"""Source lines as the board keeps them: "file:line:function" of the user's own code."""

from __future__ import annotations

import os
import zlib

from .. import protocol

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .board import BoardWriter

INSTALLED = ("site-packages", "dist-packages")
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
FILE_LIMIT = 300  # the end of a path says more than its beginning


def place_text(file: str, line: int, function: str) -> str:
    return f"{file[-FILE_LIMIT:]}:{line}:{function}"


def foreign_code(torch: Any) -> tuple[str, str, str]:
    """How file names begin that are not the user's: torch, the harness (probe and fault), frozen modules."""
    harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.dirname(torch.__file__) + os.sep, harness + os.sep, "<frozen "


def innermost_own(frame: Any, foreign: tuple[str, ...]) -> Any:
    """The same, if it can be outside of installed packages and the standard library too."""
    first = found = innermost(frame, foreign)
    while found is not None and is_installed(found.f_code.co_filename):
        found = innermost(found.f_back, foreign)
    return first if found is None else found


def is_installed(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) or any(word in file for word in INSTALLED)


def innermost(frame: Any, foreign: tuple[str, ...]) -> Any:
    """The innermost of these frames that is the user's, None where all are foreign."""
    while frame is not None and frame.f_code.co_filename.startswith(foreign):
        frame = frame.f_back
    return frame


def chain(frame: Any, foreign: tuple[str, ...]) -> str:
    """The user's lines that led here, innermost first, as many as the board takes whole."""
    lines: list[str] = []
    length = 0
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(foreign) and not is_installed(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}:{code.co_name}"
            length += len(line.encode("utf-8", "replace")) + len(protocol.STEPPED_JOIN)
            if length > protocol.STRING_LIMIT:
                break
            lines.append(line)
        frame = frame.f_back
    return protocol.STEPPED_JOIN.join(lines)


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
