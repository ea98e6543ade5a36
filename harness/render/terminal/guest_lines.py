"""Guest lines: the few words that `watch` adds to the stderr of a job: a stall, a proof, and what became of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TextIO

from nsa_harness.core.report import Outcome, Status
from nsa_harness.render.listener import Silent
from nsa_harness.render.text import escape

_NAME = "nsa-harness"


class GuestLines(Silent):
    """Whole lines, each with our name; a stderr that is gone costs the words and nothing else."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        """`quiet`: without the line at the start."""
        self._stream = stream
        self._quiet = quiet

    def begun(self, run_dir: Path) -> None:
        if not self._quiet:
            self.say(f"observing; report: {run_dir}/SUMMARY.md")

    def suspect(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.say(f"stall: {text}")

    def released(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.say(f"moves: {text}")

    def still_there(self, outcome: Outcome, run_dir: Path, then: str) -> None:
        """What is proven of a job that has not ended."""
        name = outcome.verdict.status if outcome.verdict.status is Status.HANG else f"{outcome.verdict.cause}"
        self.say(f"{name}: {outcome.verdict.summary}; {then}; report: {run_dir}/SUMMARY.md")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{_NAME}: {escape(text)}\n")
            self._stream.flush()
