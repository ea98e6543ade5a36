"""Native Sparse Attention (NSA) as a function, as a layer, and in a language model with its training program.

The package works without nsa-harness. `nsa_func` is the operation on projected tensors, `NSAttention` a layer, and
`TinyLM` the language model that `python -m nsa_attention.train` trains. Each submodule is imported only when one of its
public names is first used, because torch is slow to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import NSAttention
    from .config import NSAConfig
    from .dense_weights import load_dense_weights
    from .functional import compress_mean, nsa_func
    from .model import TinyLM
    from .ops.dispatch import MissingImplementationError
    from .tile_tuning import tune

__all__ = [
    "MissingImplementationError",
    "NSAConfig",
    "NSAttention",
    "TinyLM",
    "compress_mean",
    "load_dense_weights",
    "nsa_func",
    "tune",
]

_MODULES = {
    "MissingImplementationError": "ops.dispatch",
    "NSAConfig": "config",
    "NSAttention": "attention",
    "TinyLM": "model",
    "compress_mean": "functional",
    "load_dense_weights": "dense_weights",
    "nsa_func": "functional",
    "tune": "tile_tuning",
}
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
