"""The terminal output of an experiment: printed lines and a status line."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Lock
from typing import TextIO

from nsa_harness.core.report import Trouble
from nsa_harness.render.listener import Listener
from nsa_harness.render.terminal.layout import cropped
from nsa_harness.render.terminal.stream import Paint, Styles, Writer
from nsa_harness.render.text import escape
from nsa_harness.texts import words

_PATIENCE_S = 1.0  # how long to wait for the terminal after a second Ctrl-C; it may accept no output any more


class ExperimentScreen(Listener):
    """The terminal output of a running experiment.

    Its methods must be called one at a time, except `on_interrupt`, which may interrupt another call. They never raise
    an exception: `trouble` lists the output that could not be shown, with the reasons.
    """

    styles: Styles = ()
    interruptions = (
        "interrupted: ending this run; finished runs still count",
        "interrupted: killing the processes now",
    )

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        live: bool = True,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the output without writing anything. `live`: redraw the status line if the stream supports it."""
        self._paint = Paint(stream, os.environ if environ is None else environ, self.styles, live=live)
        self._writer = Writer(stream, self.frame if self._paint.supports_live_view else None)
        self._clock_s = clock_s
        self._lock = Lock()  # protects the state that `frame` reads in the writer's thread
        self._running: tuple[str, float] | None = None
        self._interrupts = 0
        self.trouble: list[Trouble] = []
        self.lost_terminal: Callable[[], None] = lambda: None  # called for each line that cannot be written

    @classmethod
    def print_lines(cls, lines: Callable[[int], Iterable[str]]) -> None:
        """Print lines to stdout. `lines` is called with the width of the terminal in columns."""
        with closing(cls(sys.stdout, live=False)) as screen:
            screen.show(lines)

    def show(self, lines: Callable[[int], Iterable[str]]) -> None:
        """Print lines. `lines` is called with the width of the terminal in columns."""
        with self._harmless():
            self._print(lines(self._width))

    def running(self, text: str | None) -> None:
        """Show `text` and the elapsed time in the status line, or clear the line if `text` is None."""
        with self._harmless():
            with self._lock:
                self._running = None if text is None else (escape(text), self._clock_s())
            if self._paint.supports_live_view:
                self._writer.start()

    def on_interrupt(self, count: int) -> None:
        with self._harmless():
            self._interrupts = count
            self._writer.write(f"{self._paint.without_colour(f'  {self.interruptions[min(count, 2) - 1]}')}\n")

    def settle(self) -> None:
        """Wait until all output so far has been written to the stream."""
        with self._harmless():
            self._writer.settle()

    def close(self) -> None:
        with self._harmless():
            self._stop()
            self._writer.close(_PATIENCE_S if self._interrupts > 1 else None)

    def frame(self) -> list[str]:
        """Return a list with the status line, or an empty list if nothing is running."""
        with self._lock:
            running = self._running
        if running is None:
            return []
        text, since_s = running
        return [self._fit_line(f"  {text}   {words.seconds(self._clock_s() - since_s)}")]

    def _stop(self) -> None:
        with self._lock:
            self._running = None

    def _fit_line(self, line: str) -> str:
        return self._paint.colour(cropped(line, self._width - 1))  # a full line would wrap when the window shrinks

    @property
    def _width(self) -> int:
        return self._paint.size[0]

    def _print(self, lines: Iterable[str]) -> None:
        self._writer.write("".join(f"{self._paint.colour(line)}\n" for line in lines))

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.trouble.append(Trouble(what=f"output through {type(self).__name__}", why=why))
            if isinstance(error, OSError) and error.errno == errno.EIO:
                self.lost_terminal()
