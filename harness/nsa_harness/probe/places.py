"""Source lines as the board keeps them: "file:line:function" of the user's own code."""

from __future__ import annotations

import os

from .. import protocol

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
