"""A stream for people: what it can show, and the one thread that writes to it.

A slow or broken terminal holds up nothing but itself.
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


REDRAW_S = 0.2  # as often as the watch looks
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"

_Frame = Callable[[], Sequence[str]]


class Writer:
    """Texts in the order they were given, and below them a frame that is drawn again and again."""

    def __init__(self, stream: TextIO, frame: _Frame | None = None) -> None:
        """`frame` yields the lines to show now, each narrower than the screen, fewer than it has rows."""
        self._stream = stream
        self._frame = frame
        # SimpleQueue is the queue that a signal handler may fill.
        self._queue: SimpleQueue[str | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._shown: tuple[str, ...] = ()

    def write(self, text: str) -> None:
        """Hand over a text. Raises what went wrong with an earlier one."""
        self._queue.put(text)
        self.start()

    def start(self) -> None:
        """From here on the frame is drawn. Raises what went wrong since the last call."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="terminal", daemon=True)
            self._thread.start()
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Return when everything handed over is on the stream, and the frame as it is now."""
        if self._thread is not None:
            written = Event()
            self._queue.put(written)
            written.wait()

    def close(self, patience_s: float | None = None) -> None:
        """Write what is left, remove the frame. `patience_s` is for a reader that may never read again."""
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
        """What was handed over; nothing when it is time for the next frame."""
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
        except Exception as error:  # the texts matter more than the frame
            self._frame, self._failure = None, error
            return ()

    def _put(self, text: str, lines: tuple[str, ...]) -> None:
        """One write, so that nothing is seen half drawn."""
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
