"""Terminal: the human-readable listener. It has a live view on a terminal, and plain lines everywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TextIO

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.evidence.live import FirstSnapshot, Progress, ProgressNews, next_news, time_left_s
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report, Status
from nsa_harness.render import answer
from nsa_harness.render.documents.code_hosts import github_annotations
from nsa_harness.render.listener import Listener
from nsa_harness.render.terminal.layout import paragraph
from nsa_harness.render.terminal.live_view import Ended, Running, View, interrupted_lines, view_lines
from nsa_harness.render.terminal.screen import (
    done_lines,
    launched_lines,
    look_lines,
    news_line,
    outcome_line,
    outcome_lines,
    plan_lines,
)
from nsa_harness.render.terminal.stream import Paint, Writer
from nsa_harness.render.text import escape

_PLAIN_COLUMNS = 80
_KILLED_PATIENCE_S = 1.0  # for the last lines of a killed run: its terminal may not read them
# A verdict is at the start of a line, or after its number in the table of a plan.
_VERDICT = r"(?:^|(?<=^  [0-9]  )|(?<=^  [ 0-9][0-9]  )|(?<=^  [ 0-9][ 0-9][0-9]  ))"
_STYLES = (
    (_VERDICT + r"PASS(?= )", "bold green"),
    (_VERDICT + r"HANG(?= )", "bold white on red"),
    (_VERDICT + r"FAIL(?= )", "bold red"),
    (_VERDICT + r"ERROR(?= )", "bold yellow"),
    (_VERDICT + r"SKIP(?= )", "bold cyan"),
    (_VERDICT + r"MOVES(?= )", "bold green"),
    (_VERDICT + r"STALL(?= )", "bold yellow"),
    (_VERDICT + r"OPEN(?= )", "bold yellow"),
    (r"^(?:    )?stall(?=  )", "yellow"),
    (r"^moves(?=  )", "green"),
    (r"^      (▸|>) +[0-9]+ (│|\|).*", "bold"),
    (r"^    look at (?= )", "bold"),
    (r"(?<=  )(▸|>) .*", "bold"),
    (r"(◀|<) culprit", "bold red"),
    (r"not as expected", "bold red"),
    (r"^  interrupted(?=:| twice:)", "bold yellow"),
    (r"━+", "green"),
    (
        r"^  (why a hang|last shared|means|cause|also|do|proof|findings|ruled out|checked|not covered|not captured"
        r"|memory|signals|NCCL|times|ended|repeat|next|more|launch|run|finish|expected)(?=  |$)",
        "dim",
    ),
)


class Terminal(Listener):
    """Prints the lines of the screens. Only its writer writes to the stream."""

    def __init__(
        self,
        stream: TextIO,
        *,
        version: str,
        playbook: Playbook,
        environ: Mapping[str, str] | None = None,
        live: bool = True,
        several: bool = False,
        verbose: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`playbook`: the questions about runs of nsa-harness's own program.

        `live`: show a live view if the stream allows one. False if something else writes to the same terminal.
        `several`: several runs follow, which end in a line each. A plan sets it too.
        `verbose`: show what an answer rests on, above the answer.
        """
        self._verbose = verbose
        environ = os.environ if environ is None else environ
        self._workspace = environ.get("GITHUB_WORKSPACE", "") if environ.get("GITHUB_ACTIONS") == "true" else None
        self._paint = Paint(stream, environ, _STYLES, live=live)
        self._version = version
        self._playbook = playbook
        self._clock_s = clock_s
        self._writer = Writer(stream, self.frame if self._paint.lively else None)
        self._lock = Lock()  # between the listener's calls and the frame
        self._running: dict[str, tuple[Running, float]] = {}  # with the time of its last event
        self._last_news: dict[str, ProgressNews] = {}
        self._ended: list[Ended] = []
        self._planned = 0  # runs, without what is skipped
        self._several = several
        self._interrupts = 0

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        self.expect_runs(sum(isinstance(spec, RunSpec) for spec in specs), several=len(specs) > 1)
        self._print(plan_lines(self._version, facts, specs, self._width))

    def expect_runs(self, planned: int, *, several: bool = True) -> None:
        """Set the number of runs, for the estimate of the time left. If there are several, each ends in a line."""
        self._planned, self._several = planned, several

    def on_launch(self, spec: RunSpec) -> None:
        self._print(["", *launched_lines(spec, self._width)])

    def on_phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Keep the phase for the live view. Without a live view, print a line if there is news."""
        with self._lock:
            known = self._running.get(attempt)
            suspicion = known[0].suspicion if known else None
            running = Running(name=attempt, phase=phase, progress=progress, suspicion=suspicion)
            self._running[attempt] = (running, self._clock_s())
        if self._paint.lively:
            self._writer.start()
        elif fresh := next_news(self._last_news.get(attempt), phase, progress):
            self._last_news[attempt] = fresh
            self._print(news_line(attempt, phase, progress, self._width))

    def on_first_snapshot(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:  # noqa: ARG002
        self._print(["", *look_lines(rows, self._width)])

    def on_stall(self, attempt: str, text: str) -> None:
        """Show the stall in the live view until it ends. Without a live view, print a line."""
        if not self._note(attempt, text):
            self._print(paragraph(escape(f"stall  {attempt}   {text}"), self._width, "", "       "))

    def on_progress_again(self, attempt: str, text: str) -> None:
        self._note(attempt, None)
        self._print(paragraph(escape(f"moves  {attempt}   {text}"), self._width, "", "       "))

    def on_interrupt(self, count: int) -> None:
        """Show the interruption in the next frame of the live view, or print it."""
        self._interrupts = count
        if not (self._paint.lively and self._running):
            self._writer.write(self._interruption())

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:  # noqa: ARG002
        with self._lock:
            self._running.pop(outcome.dir, None)
            self._ended.append(
                Ended(
                    status=outcome.verdict.status,
                    expected=outcome.expected,
                    counts=outcome.final,
                    took_s=outcome.timing.wall_s,
                )
            )
        self._last_news.pop(outcome.dir, None)
        if self._several or (outcome.attempt > 1 and answer.went_well(outcome)):
            self._print(outcome_line(outcome, self._width))
        else:
            self._print(["", *outcome_lines(outcome, self._width, verbose=self._verbose)])

    def on_done(self, report: Report, run_dir: Path) -> None:
        with self._lock:
            self._running.clear()
        between = [""] if len(report.outcomes) != 1 else []
        self._print([*between, *done_lines(report, self._playbook, run_dir, self._width)])
        if self._workspace is not None:
            self._writer.write("".join(f"{line}\n" for line in github_annotations(report, self._workspace)))
        self._writer.settle()

    def settle(self) -> None:
        """Return when everything printed so far is on the stream."""
        self._writer.settle()

    def close(self) -> None:
        killed = self._interrupts > 1
        if killed and self._running:
            self._writer.write(self._interruption())
        with self._lock:
            self._running.clear()
        self._writer.close(_KILLED_PATIENCE_S if killed else None)

    def _note(self, attempt: str, suspicion: str | None) -> bool:
        """Store the suspicion with its attempt. Return False if no live view will show it."""
        with self._lock:
            if attempt not in self._running:
                return False
            running, heard_s = self._running[attempt]
            self._running[attempt] = (replace(running, suspicion=suspicion), heard_s)
        return self._paint.lively

    def frame(self) -> list[str]:
        """Return the live view. The writer calls it in its thread; elapsed times grow while the watch is busy."""
        with self._lock:
            now_s = self._clock_s()
            running = tuple(_aged(attempt, now_s - heard_s) for attempt, heard_s in self._running.values())
            ended = tuple(self._ended)
        if not running:
            return []
        width, height = self._paint.size
        view = View(
            running=running,
            ended=ended,
            planned=self._planned,
            left_s=_left_s(running, ended, self._planned),
            interrupts=self._interrupts,
        )
        # A full line or screen would scroll or wrap when the window shrinks.
        return [self._paint.painted(line) for line in view_lines(view, width - 1, height - 1)]

    @property
    def _width(self) -> int:
        return self._paint.size[0]

    def _print(self, lines: Iterable[str]) -> None:
        self._writer.write("".join(f"{self._paint.painted(line)}\n" for line in lines))

    def _interruption(self) -> str:
        """Return the lines without colour: a signal may interrupt the console."""
        lines = interrupted_lines(self._interrupts, _PLAIN_COLUMNS)
        return "".join(f"{self._paint.bare(line)}\n" for line in lines)


def _aged(running: Running, by_s: float) -> Running:
    return replace(running, progress=replace(running.progress, elapsed_s=running.progress.elapsed_s + by_s))


def _left_s(running: Sequence[Running], ended: Sequence[Ended], planned: int) -> float | None:
    ran = [attempt for attempt in ended if attempt.status is not Status.SKIP]
    waiting = max(planned - sum(attempt.counts for attempt in ran) - len(running), 0)
    elapsed_s = [attempt.progress.elapsed_s for attempt in running]
    return time_left_s([attempt.took_s for attempt in ran], elapsed_s, waiting)
