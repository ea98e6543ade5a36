"""Which files the program began anew, and where: several ranks that do so to one file overwrite each other."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from .places import innermost_own, place_text
from .status_file import StatusFileWriter
from .trouble import TroubleLog

FILES_LIMIT = 64
NO_FILES = ("/dev/", "/proc/", "/sys/")


class WrittenFiles:
    """Hears of every file that is opened to be written from its beginning: one comparison an audit event."""

    def __init__(self, board: StatusFileWriter, trouble: TroubleLog, foreign: tuple[str, ...]) -> None:
        self._board, self._trouble, self._foreign = board, trouble, foreign
        self._files: dict[str, tuple[str, int]] = {}  # with the line, and the step that was in progress

    def watch(self, torch: Any) -> None:
        """What torch.save writes, it opens below Python."""

        def opened(event: str, arguments: tuple[Any, ...]) -> None:
            # What the hook raised, the program's open would raise.
            if event == "open" and self._board.live and arguments[2] & os.O_TRUNC:
                self._trouble.attempt("looks at files", lambda: self._opened(arguments[0]))

        def open_writer(name: Any) -> Any:
            if self._board.live:
                self._trouble.attempt("looks at files", lambda: self._opened(name))
            return original(name)

        original = torch.serialization._open_zipfile_writer
        torch.serialization._open_zipfile_writer = functools.wraps(original)(open_writer)
        sys.addaudithook(opened)

    def _opened(self, name: Any) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)) or len(self._files) >= FILES_LIMIT:
            return
        path = os.path.realpath(os.fsdecode(name))
        frame = (
            None if path in self._files or path.startswith(NO_FILES) else innermost_own(sys._getframe(1), self._foreign)
        )
        if frame is not None:
            self._files[path] = (
                place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name),
                self._board.step,
            )

    def records(self) -> list[dict[str, Any]]:
        """Those that are there at the end and hold something: a lock holds nothing, what was renamed is gone."""
        return [
            {"at": "wrote", "path": path, "place": place, "step": step}
            for path, (place, step) in self._files.items()
            if os.path.isfile(path) and os.path.getsize(path)
        ]
