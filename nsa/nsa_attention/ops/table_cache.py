"""A cache of small tables that all layers of a model share.

Below a few thousand tokens the host limits the speed of a pass, so tables are not computed again. Tables for single
sequences are cached by their arguments. Tables for packed sequences are cached as long as the `starts` tensor is alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils.weak import WeakIdKeyDictionary

Table = TypeVar("Table")

MAX_ENTRIES = 64  # number of tables cached by arguments; a table has about four numbers per token
_MISSING: Any = object()
_by_arguments: OrderedDict[Hashable, Any] = OrderedDict()
_by_starts = WeakIdKeyDictionary()  # starts tensor -> (its version, {key: table})


def cached_table(
    starts: Tensor | None, device: torch.device, arguments: Hashable, compute: Callable[[], Table]
) -> Table:
    """Return a table from the cache. If it is not cached yet, call `compute` to create it.

    `arguments` starts with the name of the table. `starts` are the starts of packed sequences, or None; if they were
    changed in place, the table is computed again. Nothing is cached while torch.compile traces or a CUDA graph is
    captured, because results have no values yet. The function never waits for the device.
    """
    if not _may_cache(starts, device):
        return compute()
    key = (arguments, device, _stream(device), torch.is_inference_mode_enabled())
    if starts is not None:
        return _table_for_starts(starts, key, compute)
    # pop is atomic; the backward pass runs in another thread.
    table: Table = _by_arguments.pop(key, _MISSING)
    if table is _MISSING:
        table = compute()
    _by_arguments[key] = table  # the latest entry comes last
    if len(_by_arguments) > MAX_ENTRIES:
        _by_arguments.popitem(last=False)
    return table


def clear_cache() -> None:
    """Remove all tables from the cache."""
    _by_arguments.clear()
    _by_starts.clear()


def _table_for_starts(starts: Tensor, key: Hashable, compute: Callable[[], Table]) -> Table:
    version, tables = _by_starts.get(starts, (None, {}))
    if version != starts._version:
        version, tables = starts._version, {}
        _by_starts[starts] = (version, tables)
    if key not in tables:
        tables[key] = compute()
    return tables[key]


def _may_cache(starts: Tensor | None, device: torch.device) -> bool:
    if torch.compiler.is_compiling() or detect_fake_mode() is not None:
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    # Inference tensors have no version counter, and tensor subclasses may have no values.
    return starts is None or (type(starts) is Tensor and not starts.is_inference())


def _stream(device: torch.device) -> int:
    """Return a number that identifies the current CUDA stream, because tables are cached per stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
