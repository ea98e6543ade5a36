"""What autograd shows: the size of the first backward graph, checkpoints without gradient, and its debugging modes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from .. import protocol
from .patches import TroubleLog, after_import, before_first_call, compiling_test, patch
from .places import foreign_code, frame_place, innermost
from .status_file import StatusFileWriter

CHECKPOINT = "torch.utils.checkpoint"


def watch_graph(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Write how many nodes the first backward graph has: a Python loop over tokens shows in this number."""

    def first_backward(arguments: Any, options: Any) -> None:
        tensors = arguments[0] if arguments else options.get("tensors")
        losses = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        nodes = count_nodes(getattr(loss, "grad_fn", None) for loss in losses)
        status_file.fact(protocol.FACT_NODES, str(nodes))

    unless = compiling_test(torch)
    before_first_call(torch.autograd, "backward", "autograd nodes", trouble, first_backward, unless=unless)


def count_nodes(roots: Iterable[Any]) -> int:
    """Return the number of nodes reachable from `roots`, up to NODES_LIMIT. Costs about 2.6 us each."""
    seen = {root for root in roots if root is not None}
    queue = list(seen)
    while queue:
        for node, _ in queue.pop().next_functions:
            if len(seen) == protocol.NODES_LIMIT:
                return protocol.NODES_LIMIT
            if node is not None and node not in seen:
                seen.add(node)
                queue.append(node)
    return len(seen)


def watch_checkpoints(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Write the first line that calls a reentrant checkpoint without an input that requires a gradient.

    The parameters inside such a checkpoint get no gradient.
    """

    def loaded() -> None:
        trouble.attempt("checkpoint inputs", lambda: _patch_checkpoint(torch, status_file, trouble))

    after_import((CHECKPOINT,), loaded, trouble)


def _patch_checkpoint(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Patch torch's own check, which only reentrant checkpoints call. Raises if this torch has none."""
    foreign = foreign_code(torch)
    noted: set[str] = set()

    def checked(arguments: Any, _options: Any) -> None:
        inputs, frame = arguments[0], innermost(sys._getframe(2), foreign)
        if noted or frame is None or not isinstance(inputs, (tuple, list)):
            return
        if any(getattr(value, "requires_grad", False) for value in inputs):
            return
        noted.add(frame_place(frame))
        status_file.fact(protocol.FACT_CHECKPOINT_INPUT, *noted)

    module, unless = sys.modules[CHECKPOINT], compiling_test(torch)
    patch(module, "check_backward_validity", "checkpoint inputs", trouble, before=checked, unless=unless)


def switch_debugging_on(torch: Any, trouble: TroubleLog) -> None:
    """Switch on the debugging modes that the launch asks for and that cost too much for every run.

    A program that sets a mode itself overrides this.
    """
    if protocol.ENV_ANOMALY in os.environ:
        trouble.attempt("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=True))
    if protocol.ENV_CHECKPOINT_DEBUG in os.environ:

        def loaded() -> None:
            trouble.attempt("checkpoint debug", _debug_checkpoints)

        after_import((CHECKPOINT,), loaded, trouble)


def _debug_checkpoints() -> None:
    """Enter the context manager of the debugging mode, and never leave it."""
    context = sys.modules[CHECKPOINT].set_checkpoint_debug_enabled(True)
    context.__enter__()
    _held.append(context)


_held: list[Any] = []  # a context manager leaves its block when it is collected
