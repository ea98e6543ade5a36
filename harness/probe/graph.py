"""How large the first backward graph is: a Python loop over tokens shows in its number of autograd nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import protocol
from .board import Board
from .hooks import compiling_test
from .trouble import Trouble


def install(torch: Any, board: Board, trouble: Trouble) -> None:
    """Cover torch.autograd.backward until it is called for the first time."""
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


def _say(board: Board, tensors: Any) -> None:
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
