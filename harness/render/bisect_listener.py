"""BisectScreen: what a bisection tells people while it runs: on a terminal a line drawn again, else plain lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TextIO

from harness.core.bisect.asking import Round
from harness.core.bisect.told import BisectTold, ProbeTold
from harness.core.trouble import Trouble
from harness.render import bisect_screen
from harness.render.bisect_grid import Grid, Next
from harness.render.layout import paragraph
from harness.render.paint import Paint
from harness.render.text import escape
from harness.render.words import UNKNOWN
from harness.render.writer import Writer

_PATIENCE_S = 1.0  # for the last words of a search that was killed: nobody may be reading them
STYLES = (
    (r"(?<=   )PASS(?= |$)", "green"),
    (r"(?<=   )HANG(?= |$)", "bold red"),
    (r"(?<=   )FAIL(?= |$)", "bold red"),
    (r"(?<=   )(ERROR|none)(?= |$)", "yellow"),
    (r"(?<=   )SKIP(?= |$)", "cyan"),
    (r"^BISECT(?=  )", "bold"),
    (r"^ANSWER(?=  )", "bold white on green"),
    (r"^UNDECIDED(?=  )", "bold black on yellow"),
    (r"another failure", "yellow"),
    (r"■", "bold"),
    (r"·", "dim"),
    (r"^  (place|hangs|fails|passes|alone|tells|open|do|paste|note|log|page|not tried)(?=  |$)", "dim"),
)


class BisectScreen:
    """Called one call at a time, in the order in which things happen; `interrupted` alone may come in between.

    Nothing is raised into the search: what could not be shown stands in `trouble`.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        live: bool = True,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: a line that is drawn again, where the stream allows one."""
        self._paint = Paint(stream, os.environ if environ is None else environ, STYLES, live=live)
        self._writer = Writer(stream, self.frame if self._paint.lively else None)
        self._clock_s = clock_s
        self._lock = Lock()  # between the calls and the frame
        self._running: _Running | None = None
        self._grid: Grid | None = None
        self._pending: _Pending | None = None
        self._interrupts = 0
        self._troubles: list[Trouble] = []

    @property
    def trouble(self) -> tuple[Trouble, ...]:
        return tuple(self._troubles)

    def begun(self, told: BisectTold) -> None:
        """Before the first probe: the question, and the head of the picture."""
        with self._harmless():
            self._grid = Grid(subject=told.subject, width=self._width)
            self._print(bisect_screen.header_lines(told, self._width))
            self._print(self._grid.head())

    def asked(self, round_: Round, told: BisectTold) -> None:
        """Before the probes of a round are launched; `told` is what is known so far."""
        with self._harmless():
            self._row(Next(purpose=round_.purpose, open=round_.open))
            with self._lock:
                self._running = _Running(round=round_, told=told, since_s=self._clock_s())
            if self._paint.lively:
                self._writer.start()

    def probed(self, probe: ProbeTold, told: BisectTold) -> None:
        """One probe has ended. `told` holds it already. Its row waits for the next round, which says what is left."""
        with self._harmless():
            self._row(None)
            self._pending = _Pending(probe=probe, told=told)
            if self._running is not None and self._running.ended():
                with self._lock:
                    self._running = None

    def answered(self, told: BisectTold, run_dir: Path) -> None:
        with self._harmless():
            self._stop()
            self._print(["", *bisect_screen.answer_lines(told, run_dir, self._width)])
            self._writer.settle()

    def note(self, text: str) -> None:
        """A choice made on the user's behalf, or news of the search."""
        with self._harmless():
            self._row(None)
            self._print(paragraph(escape(text), self._width, "  ", "    "))

    def interrupted(self, count: int) -> None:
        """Ctrl-C or TERM, for the `count`-th time. May come from a signal handler: takes no lock, writes nothing."""
        with self._harmless():
            self._interrupts = count
            self._writer.write(f"{self._paint.bare(bisect_screen.interrupted_line(count))}\n")

    def error(self, text: str) -> None:
        """An error of the user or the harness; no answer follows."""
        with self._harmless():
            self._stop()
            first, *rest = text.splitlines() or [UNKNOWN]
            self._print([f"error: {escape(first)}", *map(escape, rest)])
            self._writer.settle()

    def settle(self) -> None:
        """Return when everything said so far is on the stream."""
        with self._harmless():
            self._writer.settle()

    def close(self) -> None:
        """Leave the screen in order. Safe to call twice and at any time."""
        with self._harmless():
            self._stop()
            self._writer.close(_PATIENCE_S if self._interrupts > 1 else None)

    def frame(self) -> list[str]:
        """Called by the writer, in its thread."""
        with self._lock:
            running = self._running
        if running is None:
            return []
        elapsed_s = self._clock_s() - running.since_s
        # A full line would wrap when the window shrinks.
        line = bisect_screen.progress_line(running.told, running.round, elapsed_s, self._width - 1)
        return [self._paint.painted(line)]

    def _stop(self) -> None:
        self._row(None)
        with self._lock:
            self._running = None

    def _row(self, following: Next | None) -> None:
        """Print the row that waits."""
        pending, self._pending = self._pending, None
        if pending is not None and self._grid is not None:
            self._print(self._grid.row(pending.probe, pending.told, following))

    @property
    def _width(self) -> int:
        return self._paint.size[0]

    def _print(self, lines: Iterable[str]) -> None:
        self._writer.write("".join(f"{self._paint.painted(line)}\n" for line in lines))

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._troubles.append(Trouble(what=f"output through {type(self).__name__}", why=why))


class _Running:
    """The round that runs, and how many of its probes have ended."""

    def __init__(self, *, round: Round, told: BisectTold, since_s: float) -> None:
        self.round = round
        self.told = told
        self.since_s = since_s
        self._left = len(round.subsets)

    def ended(self) -> bool:
        """One more probe has ended: was it the last?"""
        self._left -= 1
        return self._left <= 0


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A probe whose row is not printed yet."""

    probe: ProbeTold
    told: BisectTold
