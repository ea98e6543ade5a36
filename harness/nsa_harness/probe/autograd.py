"""Observes torch.autograd and activation checkpointing, and can switch on their debugging modes."""

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
    """Record the number of nodes of the first backward pass's autograd graph, which a Python loop makes huge."""

    def first_backward(arguments: Any, options: Any) -> None:
        tensors = arguments[0] if arguments else options.get("tensors")
        losses = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        nodes = count_nodes(getattr(loss, "grad_fn", None) for loss in losses)
        status_file.write_fact(protocol.FACT_NODES, str(nodes))

    unless = compiling_test(torch)
    before_first_call(torch.autograd, "backward", "autograd nodes", trouble, first_backward, unless=unless)


def count_nodes(roots: Iterable[Any]) -> int:
    """Return the number of autograd nodes reachable from `roots`, at most NODES_LIMIT."""
    reached_nodes = {root for root in roots if root is not None}
    queue = list(reached_nodes)
    while queue:
        for node, _ in queue.pop().next_functions:
            if len(reached_nodes) == protocol.NODES_LIMIT:
                return protocol.NODES_LIMIT
            if node is not None and node not in reached_nodes:
                reached_nodes.add(node)
                queue.append(node)
    return len(reached_nodes)


def watch_checkpoints(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Record the first reentrant checkpoint without an input that requires a gradient: its parameters get none."""

    def patch_checkpoint() -> None:
        trouble.attempt("checkpoint inputs", lambda: _patch_checkpoint(torch, status_file, trouble))

    after_import((CHECKPOINT,), patch_checkpoint, trouble)


def _patch_checkpoint(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Patch torch's check_backward_validity, a function that only reentrant checkpoints call."""
    foreign = foreign_code(torch)
    reported_places: set[str] = set()

    def check_inputs(arguments: Any, _options: Any) -> None:
        inputs, frame = arguments[0], innermost(sys._getframe(2), foreign)
        if reported_places or frame is None or not isinstance(inputs, (tuple, list)):
            return
        if any(getattr(value, "requires_grad", False) for value in inputs):
            return
        reported_places.add(frame_place(frame))
        status_file.write_fact(protocol.FACT_CHECKPOINT_INPUT, *reported_places)

    module, unless = sys.modules[CHECKPOINT], compiling_test(torch)
    patch(module, "check_backward_validity", "checkpoint inputs", trouble, before=check_inputs, unless=unless)


def switch_debugging_on(torch: Any, trouble: TroubleLog) -> None:
    """Switch on anomaly detection or checkpoint debugging, which are slow, if an environment variable requests it."""
    if protocol.ENV_ANOMALY in os.environ:
        trouble.attempt("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=True))
    if protocol.ENV_CHECKPOINT_DEBUG in os.environ:

        def debug_checkpoints() -> None:
            trouble.attempt("checkpoint debug", _debug_checkpoints)

        after_import((CHECKPOINT,), debug_checkpoints, trouble)


def _debug_checkpoints() -> None:
    """Switch on torch's checkpoint debugging for the rest of the process."""
    context = sys.modules[CHECKPOINT].set_checkpoint_debug_enabled(True)
    context.__enter__()
    _open_contexts.append(context)


_open_contexts: list[Any] = []  # keeps context managers alive: one that is garbage-collected would leave its block
