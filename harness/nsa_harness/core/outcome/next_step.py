"""The command to run next after a run that reached its deadline while it was still active."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.profile import pace
from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.plan import Launcher, RunSpec

_RESERVE = 1.25  # the proposed deadline is this many times the projected duration, because steps vary
_SLOWED_BY = (Cause.STRAGGLER, Cause.INPUT_BOUND)  # findings that say why a run is slow


def after_slow(spec: RunSpec, evidence: Evidence, codes: Collection[str]) -> str | None:
    """Return the command to run after a slow run, or None if the run was not slow.

    `codes` are the codes of the run's findings. If one of them says why the run is slow, the command explains it.
    Otherwise the command runs the script again, with a deadline that suffices at the measured rate. If the number of
    planned steps is unknown, or if a command line cannot repeat the launch, the command explains the cause `slow`.
    """
    if Cause.SLOW not in codes or evidence.ending is not Ending.DEADLINE:
        return None
    if reason := next((cause for cause in _SLOWED_BY if cause in codes), None):
        return f"nsa-harness explain {reason}"
    speed, script = pace(evidence), spec.program[0] if spec.program else ""
    is_whole = spec.launcher is Launcher.TORCHRUN and not (spec.env or spec.cwd or spec.fault)
    if speed is None or speed.left_s is None or not (is_whole and script.endswith(".py")):
        return f"nsa-harness explain {Cause.SLOW}"
    deadline_s = 10 * math.ceil(_RESERVE * (evidence.ended_s + speed.left_s) / 10)
    python = ["--python", spec.python] if spec.python else []
    arguments = ["--", *spec.program[1:]] if spec.program[1:] else []
    options = ["--ranks", str(spec.ranks), *python, f"limits.deadline_s={deadline_s}"]
    return shlex.join(["nsa-harness", "run", script, *options, *arguments])
