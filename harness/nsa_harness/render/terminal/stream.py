"""Output to a terminal or file: `Paint` adds colours, and `Writer` writes the text in a thread of its own."""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TextIO
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.render.text import ascii_only

Styles = Sequence[tuple[str, str]]  # regular expressions with the rich style of their matches


def output_size(stream: TextIO, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the columns and rows of the terminal or the environment, or `NO_WIDTH` columns for a pipe or file."""
    columns = rows = 0
    if stream.isatty():
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(stream.fileno())
    if columns and rows:
        return columns, rows
    columns, rows = (80 if stream.isatty() else NO_WIDTH), 24
    return _number(environ.get("COLUMNS"), columns), _number(environ.get("LINES"), rows)


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and int(text) else default


class Paint:
    """A painter that adds colours if the stream supports them, and knows whether it supports a live view."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str], styles: Styles, *, live: bool = True) -> None:
        """Determine whether the stream supports colours and a live view.

        `styles`: regular expressions, and the colours of the text that they match. `live`: whether a live view may be
        drawn. It must be False if another process writes to the same terminal.
        """
        self.supports_live_view = live and _supports_live_view(stream, environ)
        self._stream = stream
        self._environ = environ
        self._styles = styles
        # The console must not write to the stream: even flushing an empty capture would block on a stopped terminal.
        self._console = Console(
            file=io.StringIO(), force_terminal=self.supports_live_view, highlight=False, markup=False, _environ=environ
        )
        self._ascii = not _encodes_symbols(stream)
        self.links: dict[str, str] = {}  # text such as "train.py:14" -> the file that a click on it opens

    @property
    def size(self) -> tuple[int, int]:
        """The current number of columns and rows of the terminal."""
        return output_size(self._stream, self._environ)

    def without_colour(self, line: str) -> str:
        """Return the line without colours, as the stream can encode it. A signal handler may call this method."""
        return ascii_only(line) if self._ascii else line

    def colour(self, line: str) -> str:
        """Return the line with escape sequences for its colours and links."""
        text = styled(self.without_colour(line), self._styles)
        for name, file in self.links.items():
            text.highlight_regex(rf"(?<![\w/.-]){re.escape(name)}(?!\d)", f"link file://{quote(file)}")
        with self._console.capture() as capture:
            self._console.print(text, soft_wrap=True, end="")
        return capture.get()


def styled(line: str, styles: Styles) -> Text:
    """Return the line as rich text, with the parts that match `styles` coloured."""
    text = Text(line)
    for pattern, style in styles:
        text.highlight_regex(pattern, style)
    return text


def _supports_live_view(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the stream is a terminal on which a live view can be drawn."""
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


REDRAW_S = 0.2  # the ranks are polled at the same interval
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"

_Frame = Callable[[], Sequence[str]]


class Writer:
    """A thread that writes text to a stream and redraws a live view below it."""

    def __init__(self, stream: TextIO, frame: _Frame | None = None) -> None:
        """Prepare the writer. `frame` returns the live view. The thread is started when the first text is written."""
        self._stream = stream
        self._frame = frame
        # A signal handler may put into a SimpleQueue, but not into other queues.
        self._queue: SimpleQueue[str | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._frame_lines: tuple[str, ...] = ()  # the lines that are on the screen now

    def write(self, text: str) -> None:
        """Add `text` to the queue. If an earlier write failed, raise its exception."""
        self._queue.put(text)
        self.start()

    def start(self) -> None:
        """Start the thread if it is not running. If an earlier write failed, raise its exception."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="terminal", daemon=True)
            self._thread.start()
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Wait until all queued texts and the current live view have been written."""
        if self._thread is not None:
            everything_written = Event()
            self._queue.put(everything_written)
            everything_written.wait()

    def close(self, patience_s: float | None = None) -> None:
        """Write the queued texts, remove the live view, and wait for the thread, at most `patience_s` if given."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(patience_s)
            self._thread = None

    def _work(self) -> None:
        while True:
            items = self._next_items()
            is_last = None in items
            try:
                self._update("".join(item for item in items if isinstance(item, str)), is_last=is_last)
            except Exception as error:
                self._failure = error
            for item in items:
                if isinstance(item, Event):
                    item.set()
            if is_last:
                return

    def _next_items(self) -> list[str | Event | None]:
        """Wait for queued text or requests and return them, or [] if it is time to redraw the live view."""
        items: list[str | Event | None] = []
        try:
            items.append(self._queue.get(timeout=None if self._frame is None else REDRAW_S))
            while items[-1] is not None:
                items.append(self._queue.get_nowait())
        except Empty:
            pass
        return items

    def _update(self, text: str, *, is_last: bool) -> None:
        lines = () if is_last else self._new_frame()
        if text or lines != self._frame_lines:
            self._put(text, lines)

    def _new_frame(self) -> tuple[str, ...]:
        if self._frame is None:
            return ()
        try:
            return tuple(self._frame())
        except Exception as error:  # from now on only texts are written
            self._frame, self._failure = None, error
            return ()

    def _put(self, text: str, lines: tuple[str, ...]) -> None:
        """Write the text and the new live view in a single call."""
        has_frame = bool(self._frame_lines)
        before = f"\r{_ERASE_BELOW}" if text and has_frame else ""
        cursor = _HIDE_CURSOR if lines and not has_frame else _SHOW_CURSOR if has_frame and not lines else ""
        erase = f"\r{_ERASE_BELOW}" if has_frame and not lines else ""
        self._frame_lines = lines
        self._stream.write(before + text + erase + cursor + _frame_text(lines))
        self._stream.flush()


def _frame_text(lines: Sequence[str]) -> str:
    """Return the live view with the escape sequences that draw it over the previous one."""
    if not lines:
        return ""
    up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
    body = "\n".join(f"\r{_ERASE_LINE}{line}" for line in lines)
    return f"{_NO_WRAP}{body}{_ERASE_BELOW}\r{up}{_WRAP}"
