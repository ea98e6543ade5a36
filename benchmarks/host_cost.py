"""Count the work done by the host (CPU) for one pass of the full NSA operation, or of a whole layer.

    python -m benchmarks.host_cost                 a layer with 64 query heads and 4 key heads at 64k tokens
    python -m benchmarks.host_cost 32 8 128 8192   another number of query heads, of key heads, width and tokens

The operation runs on CPU tensors with the same checks and lists as on a GPU, but without its kernels. Every torch
operation that computes or copies is counted, also inside this package's own operators. Views and allocations are
counted separately.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.compiled import Launch, without_kernels
from benchmarks.roofline import Shape
from nsa_attention.attention import NSAttention
from nsa_attention.config import Implementation
from nsa_attention.ops import NAMESPACE, dispatch
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention
from nsa_attention.projections import TokenContext

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
# These return an alias of their input, but their schema does not mark them as views.
_VIEWS = ("aten::_reshape_alias", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


class OperationCounter(TorchDispatchMode):
    """A counter of torch operations and of the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self.views = 0
        self.own_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(f"{NAMESPACE}::"):
            self.own_operators += 1
            # torch disables the dispatch mode inside custom operators, so it is entered again to count what they call.
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        if func._can_decompose() and not func.is_view:
            with self:  # a composite operation is counted as its parts
                return func.decompose(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves((args, output)) if isinstance(tensor, Tensor)]
        if not tensors:
            return output
        if name in _ALLOCATIONS or name in _VIEWS or func.is_view:
            self.views += 1
        else:
            self.counts[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return output


def main(arguments: list[str]) -> int:
    """Print a line of JSON for each direction of a layer."""
    names = ("heads", "groups", "width", "tokens")
    sizes = dict(zip(names, map(int, arguments), strict=True)) if arguments else {"tokens": 65536}
    for direction, counts in layer_cost(Shape(**sizes)).items():
        print(json.dumps({"direction": direction, **counts}))
    return 0


def layer_cost(shape: Shape) -> dict[str, dict[str, Any]]:
    """Return what `host_cost` returns, for a layer in float16 with its projections, compression and gates.

    `rotary_bytes` is the memory traffic of the kernel for rotary embeddings, which is not among the torch operations.
    """
    with torch.device("meta"):
        layer = NSAttention(shape.heads * shape.width, shape.heads, shape.groups, dtype=torch.float16)
        x = torch.empty(1, shape.tokens, shape.heads * shape.width, dtype=torch.float16, requires_grad=True)
        context = TokenContext(rotary_cos_sin(rotary_frequencies(shape.width), shape.tokens))
    with without_kernels() as noted_launches, force_triton_on_cpu():
        layer(x, context=context)  # fills the caches that later passes use
        noted_launches.clear()
        with OperationCounter() as forward:
            output = layer(x, context=context)
        forward_launches = list(noted_launches)
        noted_launches.clear()
        with OperationCounter() as backward:
            output.backward(torch.empty_like(output))
    return {
        direction: {
            **_summary(counter, len(launches)),
            "rotary_bytes": sum(rotary_bytes(launch) for launch in launches if launch.name == "rotated"),
        }
        for direction, counter, launches in (
            ("forward", forward, forward_launches),
            ("backward", backward, noted_launches),
        )
    }


def rotary_bytes(launch: Launch) -> int:
    """Return the memory traffic of a launch of `rotated`: each tensor is read and written, each table is read."""
    size = launch.argument("p_x1").element_size()
    heads_and_tokens = [(launch.constants[f"HEADS_{n}"], launch.argument(f"tokens_{n}")) for n in range(1, 5)]
    return sum((2 * heads + 1) * tokens * launch.constants["D"] * size for heads, tokens in heads_and_tokens if heads)


def host_cost(shape: Shape, *, deterministic: bool = True) -> dict[str, dict[str, Any]]:
    """Return the number of torch operations and kernel launches in the forward and in the backward pass.

    `deterministic` is the option of `nsa_func`.
    Torch operations are listed by name with their count and bytes. Views and allocations are counted separately.
    """
    q, branches, gates, selection = _inputs(shape)
    leaves = [q, gates, *(tensor for pair in _pairs(branches) for tensor in pair)]
    result = {}

    def run() -> Tensor:
        options = {"implementation": Implementation.TRITON, "deterministic": deterministic}
        return sparse_attention(q, branches, gates, selection, window=shape.window, **options)

    with without_kernels() as noted_launches, force_triton_on_cpu():
        run()  # fills the caches that later passes use
        noted_launches.clear()
        with OperationCounter() as forward:
            output = run()
        result["forward"] = _summary(forward, len(noted_launches))
        noted_launches.clear()
        with OperationCounter() as backward:
            torch.autograd.grad(output, leaves, torch.empty_like(output))
        result["backward"] = _summary(backward, len(noted_launches))
    return result


def _summary(mode: OperationCounter, launches: int) -> dict[str, Any]:
    return {
        "operations": sum(mode.counts.values()),
        "views_and_allocations": mode.views,
        "own_operators": mode.own_operators,
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
def force_triton_on_cpu() -> Iterator[None]:
    """Within the `with` block, use the Triton implementation for CPU tensors.

    The kernel launches must be recorded instead of executed.
    """
    original = dispatch.triton_reason
    dispatch.triton_reason = lambda *_: None
    try:
        yield
    finally:
        dispatch.triton_reason = original


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
