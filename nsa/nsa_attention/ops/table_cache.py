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

Computed = TypeVar("Computed")

MOST = 64  # lengths and patterns of one sequence: a table is four numbers a token
_MISSING: Any = object()
_of_numbers: OrderedDict[Hashable, Any] = OrderedDict()
_of_tensors = WeakIdKeyDictionary()  # tensor -> (its version, {numbers: what was computed})


def kept(starts: Tensor | None, device: torch.device, numbers: Hashable, compute: Callable[[], Computed]) -> Computed:
    """What `compute` gave for these starts, unchanged since, and these numbers; it waits for no device.

    The numbers begin with a name of what is computed. A compiler, and a CUDA graph that is being captured, compute it
    anew: what they compute has its values only when they run.
    """
    if not _may_keep(starts, device):
        return compute()
    key = (numbers, device, _stream(device), torch.is_inference_mode_enabled())
    if starts is not None:
        return _of_this_version(starts, key, compute)
    # One step: the backward pass runs in a thread of its own.
    computed: Computed = _of_numbers.pop(key, _MISSING)
    if computed is _MISSING:
        computed = compute()
    _of_numbers[key] = computed  # the newest last
    if len(_of_numbers) > MOST:
        _of_numbers.popitem(last=False)
    return computed


def forget() -> None:
    """As in a new process."""
    _of_numbers.clear()
    _of_tensors.clear()


def _of_this_version(starts: Tensor, key: Hashable, compute: Callable[[], Computed]) -> Computed:
    version, computed = _of_tensors.get(starts, (None, {}))
    if version != starts._version:
        version, computed = starts._version, {}
        _of_tensors[starts] = (version, computed)
    if key not in computed:
        computed[key] = compute()
    return computed[key]


def _may_keep(starts: Tensor | None, device: torch.device) -> bool:
    if torch.compiler.is_compiling() or detect_fake_mode() is not None:
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    # A tensor of inference mode has no version, and one of another type may have no values.
    return starts is None or (type(starts) is Tensor and not starts.is_inference())


def _stream(device: torch.device) -> int:
    """Another stream would have to wait for what this one computes."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
