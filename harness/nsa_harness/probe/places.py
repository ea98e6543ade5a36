"""Finds lines of the program's own code, stored as "file:line:function"."""

from __future__ import annotations

import os

from .. import protocol

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INSTALLED = ("site-packages", "dist-packages")
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
FILE_LIMIT = 300  # characters of a path that are stored, from its end


def place_text(file: str, line: int, function: str) -> str:
    return f"{file[-FILE_LIMIT:]}:{line}:{function}"


def frame_place(frame: Any) -> str:
    """Return the position of a frame as "file:line:function", or "" if `frame` is None."""
    return "" if frame is None else place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def foreign_code(torch: Any) -> tuple[str, str, str]:
    """Return the file name prefixes of code that is not part of the program, such as torch's own files."""
    harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.dirname(torch.__file__) + os.sep, harness + os.sep, "<frozen "


def innermost_own(frame: Any, foreign: tuple[str, ...]) -> Any:
    """Return the innermost frame of the program, else of an installed package, or None if all are `foreign`."""
    first = own = innermost(frame, foreign)
    while own is not None and is_installed(own.f_code.co_filename):
        own = innermost(own.f_back, foreign)
    return first if own is None else own


def is_own(file: str, foreign: tuple[str, ...]) -> bool:
    """Return whether a file belongs to the program rather than to a library."""
    return not file.startswith(foreign) and not is_installed(file)


def is_installed(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) or any(word in file for word in INSTALLED)


def innermost(frame: Any, foreign: tuple[str, ...]) -> Any:
    """Return the innermost frame whose file name has none of the prefixes `foreign`, or None if there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(foreign):
        frame = frame.f_back
    return frame


def chain(frame: Any, foreign: tuple[str, ...]) -> str:
    """Return the lines of a call stack that are in the program's own code as a string, innermost first."""
    lines: list[str] = []
    length = 0
    while frame is not None:
        code = frame.f_code
        if is_own(code.co_filename, foreign):
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}:{code.co_name}"
            length += len(line.encode("utf-8", "replace")) + len(protocol.CHAIN_JOIN)
            if length > protocol.STRING_LIMIT:
                break
            lines.append(line)
        frame = frame.f_back
    return protocol.CHAIN_JOIN.join(lines)
