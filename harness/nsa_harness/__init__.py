"""Run training programs under torchrun, watch them, and report what happened.

The public Python interface has two functions: `plan` returns the launches for a command line, and `run_one` runs one
launch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_harness.commands.api import plan, run_one
    from nsa_harness.core.plan import RunSpec, Skip
    from nsa_harness.core.report import Culprit, Finding, Outcome, Place, Status, Verdict
    from nsa_harness.errors import HarnessError, ScenarioError, UsageError

__all__ = [
    "Culprit",
    "Finding",
    "HarnessError",
    "Outcome",
    "Place",
    "RunSpec",
    "ScenarioError",
    "Skip",
    "Status",
    "UsageError",
    "Verdict",
    "__version__",
    "plan",
    "run_one",
]
__version__ = "0.1.0"

_MODULES = {
    **dict.fromkeys(("plan", "run_one"), "commands.api"),
    **dict.fromkeys(("RunSpec", "Skip"), "core.plan"),
    **dict.fromkeys(("Culprit", "Finding", "Outcome", "Place", "Status", "Verdict"), "core.report"),
    **dict.fromkeys(("HarnessError", "ScenarioError", "UsageError"), "errors"),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used.

    This keeps the start of `--help` and of user programs fast.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
