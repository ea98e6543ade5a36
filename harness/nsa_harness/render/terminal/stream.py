"""The stream that people read: what it can show, and the one thread that writes to it.

A slow or broken terminal delays nothing else.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TextIO

from rich.console import Console
from rich.text import Text

from nsa_harness.render.text import ascii_only

Styles = Sequence[tuple[str, str]]  # a pattern, and the style of its matches


class Paint:
    """Colours lines for a stream. `lively`: whether a live view can be drawn on it."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str], styles: Styles, *, live: bool = True) -> None:
        """`live`: show a live view if the stream allows one. False if something else writes to the same terminal."""
        self.lively = live and _lively(stream, environ)
        self._stream = stream
        self._styles = styles
        # The console never writes to the stream: even flushing an empty capture would wait for a stopped terminal.
        self._console = Console(
            file=io.StringIO(), force_terminal=self.lively, highlight=False, markup=False, _environ=environ
        )
        self._ascii = not _encodes_symbols(stream)

    @property
    def size(self) -> tuple[int, int]:
        """Return columns and rows of the stream's terminal, which may have been resized since the last call."""
        if self.lively:
            try:
                columns, rows = os.get_terminal_size(self._stream.fileno())
            except (OSError, ValueError):
                columns = rows = 0
            if columns and rows:
                return columns, rows
        return self._console.width, self._console.height

    def bare(self, line: str) -> str:
        """Return the line without colour, for callers that may interrupt the console."""
        return ascii_only(line) if self._ascii else line

    def painted(self, line: str) -> str:
        text = Text(self.bare(line))
        for pattern, style in self._styles:
            text.highlight_regex(pattern, style)
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True, end="")
        return captured.get()


def _lively(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal with a movable cursor, without NO_COLOR, and not the log of a CI job."""
    if not stream.isatty() or environ.get("NO_COLOR"):
        return False
    in_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return not in_ci and environ.get("TERM", "") not in ("", "dumb", "unknown")


def _encodes_symbols(stream: TextIO) -> bool:
    try:
        "━▸◀│·→…■▒".encode(codecs.lookup(stream.encoding or "ascii").name)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


REDRAW_S = 0.2  # the period of the watch
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"

_Frame = Callable[[], Sequence[str]]


class Writer:
    """Writes texts in order, and below them a frame that it redraws."""

    def __init__(self, stream: TextIO, frame: _Frame | None = None) -> None:
        """`frame` returns the lines to show now. They must fit the screen."""
        self._stream = stream
        self._frame = frame
        # A signal handler may put into a SimpleQueue, but not into other queues.
        self._queue: SimpleQueue[str | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._shown: tuple[str, ...] = ()

    def write(self, text: str) -> None:
        """Queue a text. Raises the error of an earlier text."""
        self._queue.put(text)
        self.start()

    def start(self) -> None:
        """Start to draw the frame. Raises the error of an earlier text or frame."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="terminal", daemon=True)
            self._thread.start()
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Return when every queued text and the current frame are on the stream."""
        if self._thread is not None:
            written = Event()
            self._queue.put(written)
            written.wait()

    def close(self, patience_s: float | None = None) -> None:
        """Write the queued texts and remove the frame. Waits at most `patience_s` for a reader that may never read."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(patience_s)
            self._thread = None

    def _work(self) -> None:
        while True:
            items = self._waiting()
            last = None in items
            try:
                self._turn("".join(item for item in items if isinstance(item, str)), last=last)
            except Exception as error:
                self._failure = error
            for item in items:
                if isinstance(item, Event):
                    item.set()
            if last:
                return

    def _waiting(self) -> list[str | Event | None]:
        """Return the queued items, or none when the next frame is due."""
        items: list[str | Event | None] = []
        try:
            items.append(self._queue.get(timeout=None if self._frame is None else REDRAW_S))
            while items[-1] is not None:
                items.append(self._queue.get_nowait())
        except Empty:
            pass
        return items

    def _turn(self, text: str, *, last: bool) -> None:
        lines = () if last else self._lines()
        if text or lines != self._shown:
            self._put(text, lines)

    def _lines(self) -> tuple[str, ...]:
        if self._frame is None:
            return ()
        try:
            return tuple(self._frame())
        except Exception as error:  # without the frame, texts are still written
            self._frame, self._failure = None, error
            return ()

    def _put(self, text: str, lines: tuple[str, ...]) -> None:
        """Write texts and frame at once, so that no half-drawn frame is visible."""
        before = f"\r{_ERASE_BELOW}" if text and self._shown else ""
        cursor = _HIDE_CURSOR if lines and not self._shown else _SHOW_CURSOR if self._shown and not lines else ""
        gone = f"\r{_ERASE_BELOW}" if self._shown and not lines else ""
        self._shown = lines
        self._stream.write(before + text + gone + cursor + _drawn(lines))
        self._stream.flush()


def _drawn(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
    body = "\n".join(f"\r{_ERASE_LINE}{line}" for line in lines)
    return f"{_NO_WRAP}{body}{_ERASE_BELOW}\r{up}{_WRAP}"
