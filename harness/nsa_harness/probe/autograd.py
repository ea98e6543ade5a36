"""What autograd shows: the size of the first backward graph, checkpoints without gradient, and its debugging modes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from typing import Any

from .. import protocol
from .hooks import compiling_test
from .imports import after
from .places import foreign_code, innermost, place_text
from .status_file import StatusFileWriter
from .trouble import TroubleLog


def watch_graph(torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> None:
    """How large the first backward graph is: a Python loop over tokens shows in its number of nodes.

    Covers torch.autograd.backward until it is called for the first time.
    """
    original = torch.autograd.backward
    is_compiling = compiling_test(torch)

    def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
        if not is_compiling():
            if torch.autograd.backward is backward:
                torch.autograd.backward = original
            trouble.attempt("autograd nodes", lambda: _say(board, tensors))
        return original(tensors, *arguments, **options)

    backward.__doc__ = original.__doc__
    backward.__wrapped__ = original  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _say(board: StatusFileWriter, tensors: Any) -> None:
    given = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    board.fact(protocol.FACT_NODES, str(count_nodes(getattr(tensor, "grad_fn", None) for tensor in given)))


def count_nodes(roots: Iterable[Any]) -> int:
    """The nodes that can be reached from `roots`, up to the limit. About 2.6 us each."""
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


CHECKPOINT = "torch.utils.checkpoint"


def watch_checkpoints(torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> None:
    """Reentrant checkpoints that got no input with a gradient, by their line: what they compute never learns."""

    def loaded() -> None:
        trouble.attempt("checkpoint inputs", lambda: _cover(torch, board, trouble))

    after((CHECKPOINT,), loaded, trouble)


def _cover(torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> None:
    """torch's own check, which warns: called by reentrant checkpoints alone. Raises where this torch has none."""
    module: Any = sys.modules[CHECKPOINT]
    check = module.check_backward_validity
    is_compiling, foreign = compiling_test(torch), foreign_code(torch)
    noted: set[str] = set()

    def note(inputs: list[Any]) -> None:
        frame = innermost(sys._getframe(1), foreign)
        if noted or frame is None or any(getattr(one, "requires_grad", False) for one in inputs):
            return
        noted.add(place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        board.fact(protocol.FACT_UNFED, *noted)

    @functools.wraps(check)
    def check_backward_validity(inputs: Iterable[Any]) -> Any:
        given = list(inputs)
        if not noted and not is_compiling():
            trouble.attempt("checkpoint inputs", lambda: note(given))
        return check(given)

    module.check_backward_validity = check_backward_validity


def switch_debugging_on(torch: Any, trouble: TroubleLog) -> None:
    """Debugging modes that cost too much for every run, where a launch asks for them; each stands or falls alone.

    A program that sets one itself has the last word.
    """
    if protocol.ENV_ANOMALY in os.environ:
        trouble.attempt("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=True))
    if protocol.ENV_CHECKPOINT_DEBUG in os.environ:

        def loaded() -> None:
            trouble.attempt("checkpoint debug", _debug_checkpoints)

        after((CHECKPOINT,), loaded, trouble)


def _debug_checkpoints() -> None:
    """As if the whole program stood in the context manager, which is never left."""
    context = sys.modules[CHECKPOINT].set_checkpoint_debug_enabled(True)
    context.__enter__()
    _held.append(context)


_held: list[Any] = []  # a context manager that is collected leaves its block
