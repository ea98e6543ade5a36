"""Debugging modes of torch that cost too much for every run, switched on where a launch asks for them."""

from __future__ import annotations

import os
from typing import Any

from .. import protocol
from . import imports
from .trouble import Trouble

CHECKPOINT = "torch.utils.checkpoint"


def switch_on(torch: Any, trouble: Trouble) -> None:
    """Each mode stands or falls alone. A program that sets one itself has the last word."""
    if protocol.ENV_ANOMALY in os.environ:
        trouble.attempt("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=True))
    if protocol.ENV_CHECKPOINT_DEBUG in os.environ:

        def loaded() -> None:
            trouble.attempt("checkpoint debug", _debug_checkpoints)

        imports.after((CHECKPOINT,), loaded, trouble)


def _debug_checkpoints() -> None:
    """As if the whole program stood in the context manager, which is never left."""
    import sys

    context = sys.modules[CHECKPOINT].set_checkpoint_debug_enabled(True)
    context.__enter__()
    _held.append(context)


_held: list[Any] = []  # a context manager that is collected leaves its block
