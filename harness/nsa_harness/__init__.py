"""nsa-harness: runs training scenarios under torchrun, watches them, and says what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_harness.commands.attempt import run_one

__all__ = ["__version__", "run_one"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`run_one` when it is first asked for: `--help` and a rank of a foreign program load nothing of ours."""
    if name == "run_one":
        from nsa_harness.commands.attempt import run_one

        return run_one
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
