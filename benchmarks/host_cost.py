"""What the host does for one pass of the whole operation: torch operations around the kernels, and launches.

The operation runs on tensors of a CPU, through the same checks and lists as on a GPU, with its kernels left out. Every
operation that computes or copies counts, also inside of our own operators; views and allocations count apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.compiled import without_kernels
from benchmarks.roofline import Shape
from nsa_attention.config import Implementation
from nsa_attention.ops import NAMESPACE, dispatch
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
# Read the alias as they are; the schema does not call them views.
_VIEWS = ("aten::_reshape_alias", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self.views = 0
        self.own = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(f"{NAMESPACE}::"):
            self.own += 1
            # What is inside of our own operators would go unseen: torch turns the mode off around them.
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        if func._can_decompose() and not func.is_view:
            with self:  # what is made of other operations counts as those
                return func.decompose(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, output)) if isinstance(one, Tensor)]
        if not tensors:
            return output
        if name in _ALLOCATIONS or name in _VIEWS or func.is_view:
            self.views += 1
        else:
            self.counts[name] += 1
            self.bytes[name] += sum(one.numel() * one.element_size() for one in tensors)
        return output


def host_cost(shape: Shape) -> dict[str, dict[str, Any]]:
    """For each way the torch operations by name with their bytes, views and allocations, and launches of kernels."""
    q, branches, gates, selection = _inputs(shape)
    leaves = [q, gates, *(tensor for pair in _pairs(branches) for tensor in pair)]
    result = {}

    def run() -> Tensor:
        return sparse_attention(
            q, branches, gates, selection, window=shape.window, implementation=Implementation.TRITON
        )

    with without_kernels() as launched, _on_a_cpu():
        run()  # what is kept from pass to pass is there
        launched.clear()
        with _Operations() as forward:
            output = run()
        result["forward"] = _told(forward, len(launched))
        launched.clear()
        with _Operations() as backward:
            torch.autograd.grad(output, leaves, torch.empty_like(output))
        result["backward"] = _told(backward, len(launched))
    return result


def _told(mode: _Operations, launches: int) -> dict[str, Any]:
    return {
        "operations": sum(mode.counts.values()),
        "views_and_allocations": mode.views,
        "own_operators": mode.own,
        "launches": launches,
        "by_name": {name: [count, mode.bytes[name]] for name, count in sorted(mode.counts.items())},
    }


def _inputs(shape: Shape) -> tuple[Tensor, KeysAndValues, Tensor, Selection]:
    def leaf(heads: int, length: int, width: int) -> Tensor:
        return torch.zeros(1, heads, length, width, dtype=torch.bfloat16).requires_grad_()

    def pair(length: int) -> tuple[Tensor, Tensor]:
        return leaf(shape.groups, length, shape.width), leaf(shape.groups, length, shape.value_width)

    branches = KeysAndValues(compressed=pair(shape.blocks), selected=pair(shape.tokens), sliding=pair(shape.tokens))
    gates = torch.zeros(3, 1, shape.heads, shape.tokens, dtype=torch.bfloat16).requires_grad_()
    selection = Selection(
        block_len=shape.block_len,
        block_stride=shape.block_stride,
        select_len=shape.select_len,
        select_count=shape.select_count,
        scale=shape.width**-0.5,
    )
    return leaf(shape.heads, shape.tokens, shape.width), branches, gates, selection


def _pairs(branches: KeysAndValues) -> list[tuple[Tensor, Tensor]]:
    return [branches.compressed, branches.selected, branches.sliding]


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    """Within, the fused kernels are taken for tensors of a CPU: none of them runs."""
    own = dispatch.triton_reason
    dispatch.triton_reason = lambda *_: None
    try:
        yield
    finally:
        dispatch.triton_reason = own
