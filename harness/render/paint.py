"""Paint: what a stream can show of a line: its width, its signs, its colours, and whether it can be drawn again."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from harness.render.text import ascii_only

Styles = Sequence[tuple[str, str]]  # a pattern, and how what it matches looks


class Paint:
    """`lively` says whether a live view can be drawn on the stream."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str], styles: Styles, *, live: bool = True) -> None:
        """`live`: a live view where the stream allows one; not where something else writes to the same terminal."""
        self.lively = live and _lively(stream, environ)
        self._stream = stream
        self._styles = styles
        # It paints and never writes: even the flush of an empty capture would wait for a terminal that is stopped.
        self._console = Console(
            file=io.StringIO(), force_terminal=self.lively, highlight=False, markup=False, _environ=environ
        )
        self._ascii = not _takes_our_signs(stream)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of this stream's own terminal, asked each time: it may have been resized."""
        if self.lively:
            try:
                columns, rows = os.get_terminal_size(self._stream.fileno())
            except (OSError, ValueError):
                columns = rows = 0
            if columns and rows:
                return columns, rows
        return self._console.width, self._console.height

    def bare(self, line: str) -> str:
        """Without colour: for when the console may be at work."""
        return ascii_only(line) if self._ascii else line

    def painted(self, line: str) -> str:
        text = Text(self.bare(line))
        for pattern, style in self._styles:
            text.highlight_regex(pattern, style)
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True, end="")
        return captured.get()


def _lively(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal that can move its cursor, that nobody asked to be plain, and that is not the log of a CI job."""
    if not stream.isatty() or environ.get("NO_COLOR"):
        return False
    in_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return not in_ci and environ.get("TERM", "") not in ("", "dumb", "unknown")


def _takes_our_signs(stream: TextIO) -> bool:
    try:
        "━▸◀│·→…■▒".encode(codecs.lookup(stream.encoding or "ascii").name)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
