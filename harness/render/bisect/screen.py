"""What the terminal shows of a bisection: lines as pure functions of the values and the width, drawn while it runs."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TextIO

from nsa_harness.core.bisect.plan import Case, Stage, at_most
from nsa_harness.core.bisect.question import AnswerKind, Round
from nsa_harness.core.bisect.report import BisectReport, ProbeReport
from nsa_harness.core.report import Trouble
from nsa_harness.render import words
from nsa_harness.render.bisect import words as bisect_words
from nsa_harness.render.bisect.grid import Grid
from nsa_harness.render.bisect.rows import Next, row, rows
from nsa_harness.render.terminal.layout import command, cropped, labelled, paragraph
from nsa_harness.render.terminal.stream import Paint, Writer
from nsa_harness.render.text import escape, escaped

_LABEL = 11


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control of the plan, before it is launched."""

    name: str  # "good" or "bad"; "up to" of an end that nobody says is bad
    config: str  # in words: "no layer"
    command: str | None  # None: it cannot be launched, and `reason` says why
    reason: str = ""


def header_lines(report: BisectReport, width: int) -> Iterator[str]:
    """What is asked, of what, and the choices made on the user's behalf."""
    report = escaped(report)
    yield from paragraph(f"BISECT  {report.scenario}   {bisect_words.question(report)}", width, "", "        ")
    for line in filter(None, (report.what, *report.notes)):
        yield from paragraph(line, width, "        ")
    yield ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A case of the plan, and how long that would take."""

    case: Case
    takes_s: float | None  # None: nobody knows how long a run takes


def plan_lines(
    report: BisectReport,
    parts: Sequence[Stage],
    cases: Sequence[Expected],
    controls: Sequence[Control],
    width: int,
    known: str = "",
) -> Iterator[str]:
    """What --dry-run prints: the question, the controls, and what each case takes. Launches nothing.

    `known`: by what the time of a run is known.
    """
    report, controls = escaped((report, tuple(controls)))
    yield from header_lines(report, width)
    yield from labelled("asks", report.subject.question, width, _LABEL)
    for control in controls:
        yield from labelled(control.name, control.config, width, _LABEL)
        if control.command is not None:
            yield from command("", control.command, width, _LABEL)
        else:
            yield from labelled("", f"cannot be launched: {control.reason}", width, _LABEL)
    yield ""
    always = [f"{part.name} {part.probes}" for part in parts if not part.only_if]
    yield from labelled(
        "at most", f"{words.plural(at_most(tuple(parts)), 'probe')}: {' · '.join(always)}", width, _LABEL
    )
    longest = max((len(one.case.name) for one in cases), default=0)
    for number, one in enumerate(cases):
        yield from labelled("" if number else "if", _case_words(one, longest), width, _LABEL)
    yield from labelled("", "more where answers contradict each other", width, _LABEL)
    yield from labelled("time", known or "not known before the controls have run", width, _LABEL)
    yield from labelled("launched", "nothing", width, _LABEL)


def _case_words(one: Expected, longest: int) -> str:
    case = one.case
    how = "about" if case.about else "" if case.more else "at most"
    probes = f"{case.probes} more" if case.more else words.plural(case.probes, "probe")
    takes = "" if one.takes_s is None else f"   {words.seconds(one.takes_s)}"
    return f"{case.name:<{longest}}   {f'{how} {probes}'.strip()}{takes}"


def progress_line(report: BisectReport, running: Round, elapsed_s: float, width: int) -> str:
    """ "layers [0,12) → [4,8), about 2 probes, 40 s left   probe 5, 3.1 s"; one line, cropped."""
    return cropped(f"  {escape(_standing(report, running))}   {_running(report, running, elapsed_s)}", width)


def answer_lines(report: BisectReport, run_dir: Path, width: int) -> Iterator[str]:
    """The answer and how sure it is, the commands that show it, and what else is told."""
    report = escaped(report)
    open_ = report.answer.kind is AnswerKind.UNDECIDED
    tag = "UNDECIDED" if open_ else "ANSWER"
    found = bisect_words.open_word(report) if open_ else bisect_words.headline(report)
    setting = bisect_words.setting_word(report)
    parts = (f"{tag}  {found}", f"({setting})" if setting else "", bisect_words.sureness(report.answer))
    yield from paragraph("   ".join(filter(None, parts)), width, "", " " * (len(tag) + 2))
    yield ""
    for fact in bisect_words.facts(report):
        lines = command if fact.command else labelled
        for number, text in enumerate(fact.texts):
            yield from lines("" if number else fact.label, text, width, _LABEL)
    yield from command("paste", escape(f"{run_dir}/BISECT.md"), width, _LABEL)
    yield from command("page", escape(f"{run_dir}/report.html"), width, _LABEL)


def stored_lines(report: BisectReport, run_dir: Path, width: int) -> Iterator[str]:
    """A bisection that has ended, as `bisect --log RUN` shows it: what was on the screen."""
    report = escaped(report)
    yield from header_lines(report, width)
    yield from Grid(subject=report.subject, width=width).whole(rows(report))
    yield ""
    yield from answer_lines(report, run_dir, width)


def interrupted_line(count: int) -> str:
    if count > 1:
        return "  interrupted twice: killing now; the same command goes on where it stopped"
    return "  interrupted: ending this probe; the same command goes on where it stopped"


def _standing(report: BisectReport, running: Round) -> str:
    """The question, what is left of it, how many probes that takes at most, and how long by the probes so far."""
    subject = report.subject
    whole = bisect_words.span(subject, (0, len(subject.items)))
    now = bisect_words.span(subject, running.open)
    name = subject.key.rpartition(".")[2] if subject.ordered else bisect_words.plural(subject.noun)
    searching = running.purpose in bisect_words.SEARCHING
    text = f"{name} {whole}{f' → {now}' if searching and now != whole else ''}"
    if not searching:
        return f"{text}, {bisect_words.round_word(running.purpose)}"
    left = running.left + len(running.subsets)
    left_s = _left_s(report.probes, left, len(running.subsets))
    about = f"about {words.plural(left, 'probe')}"
    return f"{text}, {about}, {left_s} left" if left_s else f"{text}, {about} left"


def _left_s(probes: Sequence[ProbeReport], left: int, at_once: int) -> str:
    """By the mean of the probes that were launched so far."""
    took = [probe.wall_s for probe in probes if probe.launched]
    if not took:
        return ""
    left_s = sum(took) / len(took) * left / at_once
    return words.seconds(float(round(left_s))) if left_s >= 99.5 else f"{max(round(left_s), 1)} s"


def _running(report: BisectReport, running: Round, elapsed_s: float) -> str:
    first, last = len(report.probes) + 1, len(report.probes) + len(running.subsets)
    which = f"probe {first}" if first == last else f"probes {first}-{last}"
    return f"{which}, {words.seconds(elapsed_s)}"


_PATIENCE_S = 1.0  # for the last words of a search that was killed: nobody may be reading them
_LABELS = "hangs|fails|passes|alone|note|often|tells|zones|why|open|do|place|took|proven at|not tried|paste|page"
STYLES = (
    (r"(?<=   )PASS(?= |$)", "green"),
    (r"(?<=   )HANG(?= |$)", "bold red"),
    (r"(?<=   )FAIL(?= |$)", "bold red"),
    (r"(?<=   )wait(?= |$)", "red"),
    (r"(?<=   )(ERROR|none)(?= |$)", "yellow"),
    (r"(?<=   )SKIP(?= |$)", "cyan"),
    (r"^BISECT(?=  )", "bold"),
    (r"^ANSWER(?=  )", "bold white on green"),
    (r"^UNDECIDED(?=  )", "bold black on yellow"),
    (r"another failure", "yellow"),
    (r"■", "bold"),
    (r"·", "dim"),
    (rf"^  ({_LABELS})(?=  |$)", "dim"),
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
        self._pending: tuple[ProbeReport, BisectReport] | None = None  # a probe whose row is not printed yet
        self._interrupts = 0
        self._troubles: list[Trouble] = []
        self.lost_terminal: Callable[[], None] = lambda: None  # called for each word that nobody is there to take

    @property
    def trouble(self) -> tuple[Trouble, ...]:
        return tuple(self._troubles)

    def begun(self, report: BisectReport) -> None:
        """Before the first probe: the question, and the head of the picture."""
        with self._harmless():
            self._grid = Grid(subject=report.subject, width=self._width)
            self._print(header_lines(report, self._width))
            self._print(self._grid.head())

    def round_begun(self, round_: Round, report: BisectReport) -> None:
        """Before the probes of a round are launched; `told` is what is known so far."""
        with self._harmless():
            self._row(round_)
            with self._lock:
                self._running = _Running(round=round_, report=report, since_s=self._clock_s(), left=len(round_.subsets))
            if self._paint.lively:
                self._writer.start()

    def probed(self, probe: ProbeReport, report: BisectReport) -> None:
        """One probe has ended. `told` holds it already. Its row waits for the next round, which says what is left."""
        with self._harmless():
            self._row(None)
            self._pending = (probe, report)
            with self._lock:
                if self._running is not None:
                    self._running.left -= 1
                    if self._running.left == 0:
                        self._running = None

    def answered(self, report: BisectReport, run_dir: Path) -> None:
        with self._harmless():
            self._stop()
            self._print(["", *answer_lines(report, run_dir, self._width)])
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
            self._writer.write(f"{self._paint.bare(interrupted_line(count))}\n")

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
        line = progress_line(running.report, running.round, elapsed_s, self._width - 1)
        return [self._paint.painted(line)]

    def _stop(self) -> None:
        self._row(None)
        with self._lock:
            self._running = None

    def _row(self, following: Next | None) -> None:
        """Print the row that waits."""
        pending, self._pending = self._pending, None
        if pending is not None and self._grid is not None:
            probe, report = pending
            self._print(self._grid.row(row(report, probe, following)))

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
            if isinstance(error, OSError) and error.errno == errno.EIO:
                self.lost_terminal()


@dataclass(kw_only=True)
class _Running:
    """The round that runs."""

    round: Round
    report: BisectReport
    since_s: float
    left: int  # probes that have not ended
