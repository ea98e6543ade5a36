"""RunRequest: what a `run` command asks for, once every scenario is resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.schedule import ONCE, Policy


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    specs: tuple[RunSpec | Skip, ...]
    out: Path | None  # the parent of run directories; None = ./reports
    json: bool
    strict: bool
    probe: str  # off | board | full
    command: str  # as typed
    policy: Policy = ONCE
    deepen: bool = False  # look into what a run left open, by launches with one change
    jobs: int | None = 1  # runs at the same time; None = as many as cores, devices and memory allow
    resumed: Path | None = None  # the run directory to go on in
