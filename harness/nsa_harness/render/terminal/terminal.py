"""`Terminal`: a listener that prints a run's events for people, with a live view if it can be drawn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TextIO

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.evidence.live import FirstSnapshot, Progress, ProgressNews, furthest_phase, next_news, time_left_s
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report, Status
from nsa_harness.render import answer
from nsa_harness.render.documents.code_hosts import github_annotations
from nsa_harness.render.listener import Listener
from nsa_harness.render.terminal.layout import paragraph
from nsa_harness.render.terminal.live_view import EndedAttempt, RunningAttempt, View, interrupted_lines, view_lines
from nsa_harness.render.terminal.screen import (
    done_lines,
    first_snapshot_lines,
    launched_lines,
    news_line,
    outcome_line,
    outcome_lines,
    plan_lines,
    shared_notes,
)
from nsa_harness.render.terminal.stream import Paint, Writer
from nsa_harness.render.text import escape
from nsa_harness.texts.words import place_name

_PLAIN_COLUMNS = 80
_KILLED_PATIENCE_S = 1.0  # how long a killed run waits for the terminal to accept its last lines
# A verdict is at the start of a line, or after the run number in the table of a plan.
_VERDICT = r"(?:^|(?<=^  [0-9]  )|(?<=^  [ 0-9][0-9]  )|(?<=^  [ 0-9][ 0-9][0-9]  ))"
STYLES = (
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
    (r"^    look at(?= )", "bold"),
    (r"(?<=  )(▸|>) .*", "bold"),
    (r"(◀|<) culprit", "bold red"),
    (r"not as expected", "bold red"),
    (r"^  interrupted(?=:| twice:)", "bold yellow"),
    (r"━+", "green"),
    (
        r"^  (why a hang|last shared|raised|means|cause|also|do|open|proof|findings|ruled out|checked|not covered"
        r"|not captured|memory|signals|NCCL|times|ended|fixed\?|repeat|next|page|more|launch|run|finish|expected)"
        r"(?=  |$)",
        "dim",
    ),
)


class Terminal(Listener):
    """A listener that prints a run's events for people."""

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
        """Prepare the output without writing anything.

        `playbook`: the hypotheses and decision rules for runs of nsa-harness's own program.
        `live`: draw a live view if the stream supports it. False if another process writes to the same terminal.
        `several`: print one line per run instead of a full explanation. `on_plan` sets it if there are several runs.
        `verbose`: print the evidence above the explanation.
        """
        self._verbose = verbose
        environ = os.environ if environ is None else environ
        self._workspace = environ.get("GITHUB_WORKSPACE", "") if environ.get("GITHUB_ACTIONS") == "true" else None
        self._paint = Paint(stream, environ, STYLES, live=live)
        self._version = version
        self._playbook = playbook
        self._clock_s = clock_s
        self._writer = Writer(stream, self.frame if self._paint.supports_live_view else None)
        self._lock = Lock()  # the writer's thread calls `frame` during other calls
        self._running: dict[str, tuple[RunningAttempt, float]] = {}  # by attempt, with the time of its last event
        self._last_news: dict[str, ProgressNews] = {}
        self._shown_notes: set[str] = set()
        self._ended: list[EndedAttempt] = []
        self._run_count = 0  # planned runs that are not skipped
        self._several = several
        self._interrupts = 0

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        self.expect_runs(sum(isinstance(spec, RunSpec) for spec in specs), several=len(specs) > 1)
        self._shown_notes.update(shared_notes(specs))
        self._print(plan_lines(self._version, facts, specs, self._width))

    def expect_runs(self, count: int, *, several: bool = True) -> None:
        """Set the number of runs, for the remaining time. `several`: print one line per run, no explanations."""
        self._run_count, self._several = count, several

    def on_launch(self, spec: RunSpec) -> None:
        new_notes = tuple(note for note in spec.notes if note not in self._shown_notes)
        self._shown_notes.update(new_notes)
        self._print(["", *launched_lines(replace(spec, notes=new_notes), self._width)])

    def on_phase(self, attempt: str, phase: str, progress: Progress) -> None:
        """Update the live view. Without a live view, print a line if there is news."""
        with self._lock:
            previous = self._running.get(attempt)
            phase = furthest_phase(previous[0].phase if previous else None, phase)
            stall = previous[0].stall if previous else None
            running = RunningAttempt(name=attempt, phase=phase, progress=progress, stall=stall)
            self._running[attempt] = (running, self._clock_s())
        if self._paint.supports_live_view:
            self._writer.start()
        elif latest := next_news(self._last_news.get(attempt), phase, progress):
            self._last_news[attempt] = latest
            self._print(news_line(attempt, phase, progress, self._width))

    def on_job(self, attempt: str, job: str, state: str, text: str) -> None:
        line = escape(f"job    {attempt}   {job} {state}{f': {text}' if text else ''}")
        self._print(paragraph(line, self._width, "", "       "))

    def on_first_snapshot(self, attempt: str, rows: Sequence[FirstSnapshot]) -> None:  # noqa: ARG002
        self._print(["", *first_snapshot_lines(rows, self._width)])

    def on_stall(self, attempt: str, text: str) -> None:
        """Show the stall in the live view until it ends. Without a live view, print a line."""
        if not self._set_stall(attempt, text):
            self._print(paragraph(escape(f"stall  {attempt}   {text}"), self._width, "", "       "))

    def on_progress_again(self, attempt: str, text: str) -> None:
        self._set_stall(attempt, None)
        self._print(paragraph(escape(f"moving {attempt}   {text}"), self._width, "", "       "))

    def on_interrupt(self, count: int) -> None:
        """Show that Ctrl-C was pressed."""
        self._interrupts = count
        if not (self._paint.supports_live_view and self._running):
            self._writer.write(self._interruption_text())

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:  # noqa: ARG002
        with self._lock:
            self._running.pop(outcome.dir, None)
            self._ended.append(
                EndedAttempt(
                    status=outcome.verdict.status,
                    expected=outcome.expected,
                    counts=outcome.final,
                    took_s=outcome.timing.wall_s,
                )
            )
        self._last_news.pop(outcome.dir, None)
        if self._paint.supports_live_view:
            self._paint.links |= linked_files(outcome)
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
        """Wait until all output so far has been written to the stream."""
        self._writer.settle()

    def close(self) -> None:
        is_killed = self._interrupts > 1
        if is_killed and self._running:
            self._writer.write(self._interruption_text())
        with self._lock:
            self._running.clear()
        self._writer.close(_KILLED_PATIENCE_S if is_killed else None)

    def _set_stall(self, attempt: str, stall: str | None) -> bool:
        """Set or remove the text about a stall, and return whether the live view will show it."""
        with self._lock:
            if attempt not in self._running:
                return False
            running, updated_s = self._running[attempt]
            self._running[attempt] = (replace(running, stall=stall), updated_s)
        return self._paint.supports_live_view

    def frame(self) -> list[str]:
        """Return the lines of the live view, whose times keep growing. The writer's thread calls this method."""
        with self._lock:
            now_s = self._clock_s()
            running = tuple(_add_elapsed(attempt, now_s - updated_s) for attempt, updated_s in self._running.values())
            ended = tuple(self._ended)
        if not running:
            return []
        width, height = self._paint.size
        view = View(
            running=running,
            ended=ended,
            run_count=self._run_count,
            left_s=_estimate_time_left_s(running, ended, self._run_count),
            interrupts=self._interrupts,
        )
        # One column and one row stay free: a full line or screen would wrap or scroll when the window shrinks.
        return [self._paint.colour(line) for line in view_lines(view, width - 1, height - 1)]

    @property
    def _width(self) -> int:
        return self._paint.size[0]

    def _print(self, lines: Iterable[str]) -> None:
        self._writer.write("".join(f"{self._paint.colour(line)}\n" for line in lines))

    def _interruption_text(self) -> str:
        """Return the lines about Ctrl-C, without colours, because the signal may have interrupted the console."""
        lines = interrupted_lines(self._interrupts, _PLAIN_COLUMNS)
        return "".join(f"{self._paint.without_colour(line)}\n" for line in lines)


def linked_files(outcome: Outcome) -> dict[str, str]:
    """Return the names of the outcome's lines, such as "train.py:14" and "src/train.py:14", each with its file."""
    places = [frame for stack in outcome.stacks for frame in stack.frames]
    places += [outcome.culprit.place] if outcome.culprit and outcome.culprit.place else []
    return {
        name: place.file
        for place in places
        if place.file is not None and place.file.startswith("/") and place.line is not None
        for name in (place_name(place), f"{Path(place.file).name}:{place.line}")
    }


def _add_elapsed(running: RunningAttempt, seconds: float) -> RunningAttempt:
    return replace(running, progress=replace(running.progress, elapsed_s=running.progress.elapsed_s + seconds))


def _estimate_time_left_s(
    running: Sequence[RunningAttempt], ended: Sequence[EndedAttempt], run_count: int
) -> float | None:
    ran = [attempt for attempt in ended if attempt.status is not Status.SKIP]
    waiting = max(run_count - sum(attempt.counts for attempt in ran) - len(running), 0)
    elapsed_s = [attempt.progress.elapsed_s for attempt in running]
    return time_left_s([attempt.took_s for attempt in ran], elapsed_s, waiting)
