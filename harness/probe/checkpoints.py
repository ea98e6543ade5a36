"""Reentrant checkpoints that got no input with a gradient: what they compute never learns, and the line says where."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from .. import protocol
from .board import Board
from .hooks import compiling_test
from .imports import after
from .places import foreign_code, innermost, place_text
from .trouble import Trouble

MODULE = "torch.utils.checkpoint"


def watch(torch: Any, board: Board, trouble: Trouble) -> None:
    """As soon as the program has loaded checkpointing."""

    def loaded() -> None:
        trouble.attempt("checkpoint inputs", lambda: _cover(torch, board, trouble))

    after((MODULE,), loaded, trouble)


def _cover(torch: Any, board: Board, trouble: Trouble) -> None:
    """torch's own check, which warns: called by reentrant checkpoints alone. Raises where this torch has none."""
    module: Any = sys.modules[MODULE]
    check = module.check_backward_validity
    is_compiling, foreign = compiling_test(torch), foreign_code(torch)
    told: set[str] = set()

    def tell(inputs: list[Any]) -> None:
        frame = innermost(sys._getframe(1), foreign)
        if told or frame is None or any(getattr(one, "requires_grad", False) for one in inputs):
            return
        told.add(place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        board.fact(protocol.FACT_UNFED, *told)

    @functools.wraps(check)
    def check_backward_validity(inputs: Iterable[Any]) -> Any:
        given = list(inputs)
        if not told and not is_compiling():
            trouble.attempt("checkpoint inputs", lambda: tell(given))
        return check(given)

    module.check_backward_validity = check_backward_validity
