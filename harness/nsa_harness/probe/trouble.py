"""What the probe could not do, written down: a piece that fails is switched off, and the program never notices."""

from __future__ import annotations

import os
import time

from .. import protocol

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_LIMIT = 500  # characters of the reason


class TroubleLog:
    """Where the pieces of one process report that they gave up."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._noted: set[str] = set()

    def note(self, piece: str, error: BaseException) -> None:
        """One line a piece. A directory that is full or gone is nobody's fault in here: then the line is lost."""
        if piece in self._noted:
            return
        self._noted.add(piece)
        try:
            import json

            reason = f"{type(error).__name__}: {error}"[:PIECE_LIMIT]
            line = json.dumps({"piece": piece, "error": reason, "at_ns": time.monotonic_ns()})
            path = os.path.join(self._directory, protocol.TROUBLE.format(pid=os.getpid()))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, (line + "\n").encode("utf-8", "replace"))
            finally:
                os.close(descriptor)
        except (OSError, ImportError, ValueError):
            return

    def attempt(self, piece: str, do: Callable[[], object]) -> bool:
        """Run one piece of the probe; True when it stands."""
        try:
            do()
        except Exception as error:
            self.note(piece, error)
            return False
        return True
