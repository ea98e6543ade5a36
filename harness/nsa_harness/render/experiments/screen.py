"""The terminal output of a bisection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from nsa_harness.core.search.effort import EffortCase, Stage, total_probes
from nsa_harness.core.search.question import AnswerKind, Round
from nsa_harness.core.search.report import BisectReport, ProbeReport
from nsa_harness.core.search.subject import plural
from nsa_harness.core.search.waits import Waiting
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.render.experiments.picture import Grid, NextProbe, row, rows
from nsa_harness.render.terminal.layout import command, cropped, labelled, paragraph
from nsa_harness.render.text import escape, escaped
from nsa_harness.texts import words

_LABEL = 11


@dataclass(frozen=True, kw_only=True)
class PlannedControl:
    """A run with the known-good or known-bad configuration, in the form that `bisect --dry-run` shows."""

    name: str  # "good" or "bad"; "up to" for an end that is not known to fail
    config: str  # the configuration as text: "no layer"
    command: str | None  # None: it cannot be launched; `reason` says why
    reason: str = ""


def header_lines(report: BisectReport, width: int) -> Iterator[str]:
    """Yield the header for a bisection, which shows its question and what is launched."""
    report = escaped(report)
    yield from paragraph(f"BISECT  {report.scenario}   {bisect_words.question(report)}", width, "", "        ")
    for line in filter(None, (report.what, *report.notes)):
        yield from paragraph(line, width, "        ")
    yield ""


@dataclass(frozen=True, kw_only=True)
class CaseTime:
    """A possible result of a search, and the time needed to reach it."""

    case: EffortCase
    takes_s: float | None  # None if the time of a run is not known


def plan_lines(
    report: BisectReport,
    parts: Sequence[Stage],
    cases: Sequence[CaseTime],
    controls: Sequence[PlannedControl],
    width: int,
    times_text: str = "",
) -> Iterator[str]:
    """Yield the output of `bisect --dry-run`: the stages, the possible results and their expected times."""
    report, controls = escaped((report, tuple(controls)))
    yield from header_lines(report, width)
    yield from labelled("question", report.subject.question, width, _LABEL)
    for control in controls:
        yield from labelled(control.name, control.config, width, _LABEL)
        if control.command is not None:
            yield from command("", control.command, width, _LABEL)
        else:
            yield from labelled("", f"cannot be launched: {control.reason}", width, _LABEL)
    yield ""
    always = [f"{part.name} {part.probes}" for part in parts if not part.only_if]
    yield from labelled(
        "at most", f"{words.plural(total_probes(tuple(parts)), 'probe')}: {' · '.join(always)}", width, _LABEL
    )
    longest = max((len(case.case.name) for case in cases), default=0)
    for number, case_time in enumerate(cases):
        yield from labelled("" if number else "if", _case_text(case_time, longest), width, _LABEL)
    yield from labelled("", "more if results contradict each other", width, _LABEL)
    yield from labelled("time", times_text or "not known before the controls have run", width, _LABEL)
    yield from labelled("launched", "nothing", width, _LABEL)


def _case_text(case_time: CaseTime, longest: int) -> str:
    case = case_time.case
    how = "about" if case.is_estimate else "" if case.is_additional else "at most"
    probes = f"{case.probes} more" if case.is_additional else words.plural(case.probes, "probe")
    takes = "" if case_time.takes_s is None else f"   {words.seconds(case_time.takes_s)}"
    return f"{case.name:<{longest}}   {f'{how} {probes}'.strip()}{takes}"


def progress_line(
    report: BisectReport, running: Round, elapsed_s: float, width: int, left_s: float | None = None
) -> str:
    """Return a line such as "layers [0,12) → [4,8), about 2 probes; 40 s left in all   probe 5, 3.1 s"."""
    return cropped(
        f"  {escape(_state_text(report, running, left_s))}   {_running_text(report, running, elapsed_s)}", width
    )


def waiting_text(waiting: Waiting, since_s: float = 0.0) -> str:
    """Return why the search, `since_s` seconds later, still waits for a test run that makes no progress."""
    quiet = f"no progress for {words.whole_seconds(waiting.no_progress_s + since_s)}"
    if waiting.until_s is None:
        return f"{quiet}: a sleep that ends on its own; limits.deadline_s=60 would limit it"
    until = words.whole_seconds(waiting.until_s)
    if waiting.was_proven:
        return f"{quiet}: an earlier probe proved that this wait is a hang, so this probe counts as bad at {until}"
    shorter = f"limits.{waiting.limit}={max(round(waiting.until_s / 2), 1)}"
    return f"{quiet}: the hang is proven at {until}; {shorter} would shorten this"


def answer_lines(report: BisectReport, run_dir: Path, width: int) -> Iterator[str]:
    """Yield the answer of a bisection, and the commands that reproduce it."""
    report = escaped(report)
    open_ = report.answer.kind is AnswerKind.UNDECIDED
    tag = "UNDECIDED" if open_ else "ANSWER"
    answer = bisect_words.open_text(report) if open_ else bisect_words.headline(report)
    setting = bisect_words.setting_text(report)
    parts = (f"{tag}  {answer}", f"({setting})" if setting else "", bisect_words.certainty_text(report.answer))
    yield from paragraph("   ".join(filter(None, parts)), width, "", " " * (len(tag) + 2))
    yield ""
    for fact in bisect_words.facts(report):
        lines = command if fact.is_command else labelled
        for number, text in enumerate(fact.texts):
            yield from lines("" if number else fact.label, text, width, _LABEL)
    yield from command("paste", escape(f"{run_dir}/BISECT.md"), width, _LABEL)
    yield from command("page", escape(f"{run_dir}/report.html"), width, _LABEL)


def stored_lines(report: BisectReport, run_dir: Path, width: int) -> Iterator[str]:
    """Yield the output of `bisect --log` for a stored bisection."""
    report = escaped(report)
    yield from header_lines(report, width)
    yield from Grid(subject=report.subject, width=width).whole(rows(report))
    yield ""
    yield from answer_lines(report, run_dir, width)


def _state_text(report: BisectReport, running: Round, left_s: float | None) -> str:
    """Return a phrase that says what the search is doing and how much is left to do."""
    subject = report.subject
    whole = bisect_words.range_text(subject, (0, len(subject.items)))
    now = bisect_words.range_text(subject, running.open)
    name = subject.key.rpartition(".")[2] if subject.ordered else plural(subject.noun)
    searching = running.purpose in bisect_words.SEARCHING
    text = f"{name} {whole}{f' → {now}' if searching and now != whole else ''}"
    rest = "" if left_s is None else f"; {words.whole_seconds(left_s)} left in all"
    if not searching:
        return f"{text}, {bisect_words.round_text(running.purpose)}{rest}"
    about = f"about {words.plural(running.probes_left + len(running.subsets), 'probe')}"
    return f"{text}, {about}{rest or ' left'}"


def _running_text(report: BisectReport, running: Round, elapsed_s: float) -> str:
    first, last = len(report.probes) + 1, len(report.probes) + len(running.subsets)
    probes_text = f"probe {first}" if first == last else f"probes {first}-{last}"
    return f"{probes_text}, {words.seconds(elapsed_s)}"


_MIN_REPORTED_WAIT_S = 15.0  # without a status line, only a wait of at least this length is printed
_LABELS = "hangs|fails|passes|alone|note|rate|proof|results|why|unusable|do|place|took|scope|not tried|paste|page"
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


class BisectScreen(ExperimentScreen):
    """The terminal output of a running bisection, with one row for each finished test run."""

    styles = STYLES
    interruptions = (
        "interrupted: ending this probe; the same command continues the search",
        "interrupted twice: killing the processes now; the same command continues the search",
    )

    def __init__(self, stream: TextIO, **options: Any) -> None:
        super().__init__(stream, **options)
        self._round: _Running | None = None
        self._grid: Grid | None = None
        self._waits: dict[int, tuple[Waiting, float]] = {}  # by probe number: its wait, and when the wait was observed
        self._reported: set[int] = set()  # numbers of the probes whose wait was already printed
        self._pending: tuple[ProbeReport, BisectReport] | None = None  # a finished probe whose row is not printed yet

    def show_header(self, report: BisectReport) -> None:
        """Print the header for the bisection and the header for its table."""
        with self._harmless():
            self._grid = Grid(subject=report.subject, width=self._width)
            self._print(header_lines(report, self._width))
            self._print(self._grid.head())

    def show_round(self, round_: Round, report: BisectReport, left_s: float | None = None) -> None:
        """Show in the status line which test runs are being launched, and the expected remaining time, if known."""
        with self._harmless():
            self._row(round_)
            now_s, running_count = self._clock_s(), len(round_.subsets)
            with self._lock:
                self._round = _Running(
                    round=round_, report=report, since_s=now_s, running_count=running_count, left_s=left_s
                )
            if self._paint.supports_live_view:
                self._writer.start()

    def add_probe(self, probe: ProbeReport, report: BisectReport) -> None:
        """Record a finished test run. Its row is printed when the next round starts."""
        with self._harmless():
            self._row(None)
            self._pending = (probe, report)
            with self._lock:
                self._waits.pop(probe.n, None)
                if self._round is not None:
                    self._round.running_count -= 1
                    if self._round.running_count == 0:
                        self._round = None

    def show_answer(self, report: BisectReport, run_dir: Path) -> None:
        """Print the answer of the bisection, and return as soon as it has been written to the stream."""
        with self._harmless():
            self._stop()
            self._print(["", *answer_lines(report, run_dir, self._width)])
            self._writer.settle()

    def show_wait(self, n: int, waiting: Waiting | None) -> None:
        """Show that test run `n` makes no progress, or stop showing it if `waiting` is None."""
        with self._harmless():
            with self._lock:
                self._waits.pop(n, None)
                if waiting is not None:
                    self._waits[n] = (waiting, self._clock_s())
            is_long = waiting is not None and waiting.left_s >= _MIN_REPORTED_WAIT_S and n not in self._reported
            if waiting is not None and is_long and not self._paint.supports_live_view:
                self._reported.add(n)
                self.note(f"probe {n}: {waiting_text(waiting)}")

    def note(self, text: str) -> None:
        """Print a paragraph of text."""
        with self._harmless():
            self._row(None)
            self._print(paragraph(escape(text), self._width, "  ", "    "))

    def frame(self) -> list[str]:
        with self._lock:
            running, waits = self._round, [*self._waits.values()]
        if running is None:
            return []
        now_s, width = self._clock_s(), self._width
        lines = [progress_line(running.report, running.round, now_s - running.since_s, width, running.left_s)]
        if waits:
            waiting, seen_s = max(waits, key=lambda wait: wait[0].left_s)
            lines.append(f"    {waiting_text(waiting, now_s - seen_s)}")
        return [self._fit_line(line) for line in lines]

    def _stop(self) -> None:
        self._row(None)
        with self._lock:
            self._round = None

    def _row(self, following: NextProbe | None) -> None:
        """Print the row of the latest finished test run, once. `following`, if known, shows what it left open."""
        pending, self._pending = self._pending, None
        if pending is not None and self._grid is not None:
            probe, report = pending
            self._print(self._grid.row(row(report, probe, following)))


@dataclass(kw_only=True)
class _Running:
    """The round of test runs that is in progress, with the details that the status line shows."""

    round: Round
    report: BisectReport
    since_s: float
    running_count: int  # number of its probes that have not ended
    left_s: float | None  # expected remaining time of the search; None: unknown
