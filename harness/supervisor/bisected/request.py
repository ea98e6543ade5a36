"""BisectRequest: what a `bisect` command asks for, once its subject is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.core.bisect.sought import Wanted
from harness.core.bisect.subject import Subject
from harness.supervisor.bisected.launches import Templates
from harness.supervisor.planning import Question


@dataclass(frozen=True, kw_only=True)
class BisectRequest:
    question: Question  # with the scenario, or the script
    subject: Subject
    templates: Templates
    base_args: tuple[str, ...]  # of the scenario's program, before what the templates add
    wanted: Wanted
    confidence: float
    repeat: int  # how often each proof is run
    jobs: int  # probes at the same time
    budget_s: float | None  # for all probes together
    fork: bool  # probes without torchrun where that is safe; proofs never
    out: Path | None
    json: bool
    probe: str
    command: str  # as typed
