"""What is computed once and kept: for one sequence by its numbers, for packed ones as long as their starts live.

The layers of a model ask for the same small tables in each pass, and below some thousand tokens it is the host that a
pass waits for.
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

MAX_ENTRIES = 64  # lengths and patterns of one sequence: a table is four numbers a token
_MISSING: Any = object()
_by_arguments: OrderedDict[Hashable, Any] = OrderedDict()
_by_starts = WeakIdKeyDictionary()  # tensor -> (its version, {numbers: what was computed})


def cached_table(
    starts: Tensor | None, device: torch.device, arguments: Hashable, compute: Callable[[], Table]
) -> Table:
    """What `compute` gave for these starts, unchanged since, and these numbers; it waits for no device.

    The numbers begin with a name of what is computed. A compiler, and a CUDA graph that is being captured, compute it
    anew: what they compute has its values only when they run.
    """
    if not _may_cache(starts, device):
        return compute()
    key = (arguments, device, _stream(device), torch.is_inference_mode_enabled())
    if starts is not None:
        return _table_for_starts(starts, key, compute)
    # One step: the backward pass runs in a thread of its own.
    table: Table = _by_arguments.pop(key, _MISSING)
    if table is _MISSING:
        table = compute()
    _by_arguments[key] = table  # the newest last
    if len(_by_arguments) > MAX_ENTRIES:
        _by_arguments.popitem(last=False)
    return table


def clear_cache() -> None:
    """As in a new process."""
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
    # A tensor of inference mode has no version, and one of another type may have no values.
    return starts is None or (type(starts) is Tensor and not starts.is_inference())


def _stream(device: torch.device) -> int:
    """Another stream would have to wait for what this one computes."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
