"""A Native Sparse Attention (NSA) language model and its training program.

The package works without nsa-harness. `sparse_attention` is the operation on projected tensors, `NSAttention` a layer,
and `TinyLM` the language model that `python -m nsa_attention.train` trains. Each submodule is imported only when one of
its public names is first used, because torch is slow to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import NSAttention
    from .config import NSAConfig
    from .model import TinyLM
    from .ops.dispatch import MissingImplementationError
    from .ops.selection import Selection
    from .ops.sparse_attention import KeysAndValues, sparse_attention

__all__ = [
    "KeysAndValues",
    "MissingImplementationError",
    "NSAConfig",
    "NSAttention",
    "Selection",
    "TinyLM",
    "sparse_attention",
]

_MODULES = {
    "KeysAndValues": "ops.sparse_attention",
    "MissingImplementationError": "ops.dispatch",
    "NSAConfig": "config",
    "NSAttention": "attention",
    "Selection": "ops.selection",
    "TinyLM": "model",
    "sparse_attention": "ops.sparse_attention",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
