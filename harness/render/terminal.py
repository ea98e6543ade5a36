"""Terminal: the listener for people. A live screen on a terminal, plain lines everywhere else."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.core.live import Progress
from harness.core.plan import RunSpec, Skip
from harness.core.report import MachineFacts, Outcome, Report
from harness.render import words
from harness.render.layout import paragraph
from harness.render.screen import done_lines, files_lines, launched_lines, outcome_lines, plan_lines, progress_lines
from harness.render.text import ascii_only, escape

_STYLES = (
    (r"^PASS(?=  )", "bold green"),
    (r"^HANG(?=  )", "bold white on red"),
    (r"^FAIL(?=  )", "bold red"),
    (r"^ERROR(?=  )", "bold yellow"),
    (r"^SKIP(?=  )", "bold cyan"),
    (r"^stall(?=  )", "yellow"),
    (r"^moves(?=  )", "green"),
    (r"^    (▸|>) +[0-9]+ (│|\|).*", "bold"),
    (r"(◀|<) culprit", "bold red"),
    (r"━+", "green"),
    (r"^  (why a hang|meaning|cause|also|do|proof|ruled out|checked|not covered|not captured)(?=  |$)", "dim"),
    (r"^  (ended|files|repeat|report|page|next|launch|run|finish)(?=  |$)", "dim"),
)


class Terminal:
    """Prints what the pure functions of `screen` yield."""

    def __init__(self, stream: TextIO, *, version: str, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        lively = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._console = Console(file=stream, force_terminal=lively, highlight=False, markup=False, _environ=environ)
        self._ascii = not _takes_our_signs(stream)
        self._lively = lively
        self._version = version
        self._live: Live | None = None
        self._running: dict[str, tuple[str, Progress]] = {}

    def plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        self._print(plan_lines(self._version, facts, specs, self._width))

    def launched(self, spec: RunSpec) -> None:
        self._print(["", *launched_lines(spec, self._width)])

    def phase(self, scenario: str, phase: str, progress: Progress) -> None:
        """Redraws the live screen; where there is none, one line when the phase changes."""
        before = self._running.get(scenario)
        self._running[scenario] = (phase, progress)
        if self._lively:
            self._draw()
        elif before is None or before[0] != phase:
            self._print(list(progress_lines(scenario, phase, progress, self._width))[:1])

    def suspect(self, scenario: str, text: str) -> None:
        self._print(paragraph(escape(f"stall  {scenario}   {text}"), self._width, "", "       "))

    def released(self, scenario: str, text: str) -> None:
        self._print(paragraph(escape(f"moves  {scenario}   {text}"), self._width, "", "       "))

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self._running.pop(outcome.scenario, None)
        if self._running and self._lively:
            self._draw()
        else:
            self.close()
        self._print(["", *outcome_lines(outcome, self._width), *files_lines(outcome, run_dir, self._width)])

    def done(self, report: Report, run_dir: Path) -> None:
        self.close()
        alone = len(report.outcomes) == 1
        self._print(["", *done_lines(report, run_dir, self._width)][2 if alone else 0 :])

    def error(self, text: str) -> None:
        self.close()
        self._print(f"error: {escape(line)}" if number == 0 else escape(line) for number, line in _numbered(text))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _width(self) -> int:
        return self._console.width

    def _draw(self) -> None:
        if self._live is None:
            # Redirecting would take stdout away from the event stream; refreshing on a thread of its own would
            # draw while other listeners write.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        lines = (
            line
            for scenario, (phase, progress) in self._running.items()
            for line in progress_lines(scenario, phase, progress, self._width)
        )
        text = Text("\n", no_wrap=True, overflow="crop").join(map(self._painted, lines))
        self._live.update(text, refresh=True)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(self._painted(line), soft_wrap=True)

    def _painted(self, line: str) -> Text:
        text = Text(ascii_only(line) if self._ascii else line)
        for pattern, style in _STYLES:
            text.highlight_regex(pattern, style)
        return text


def _takes_our_signs(stream: TextIO) -> bool:
    try:
        "━▸◀│·→…".encode(codecs.lookup(stream.encoding or "ascii").name)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _numbered(text: str) -> enumerate[str]:
    return enumerate(text.splitlines() or [words.UNKNOWN])
