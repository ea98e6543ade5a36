"""What the host does in a pass: it waits for no value, so that a CUDA graph can hold a pass, and it does little.

Tensors of no device stand for those of a GPU: they have no value to ask for. Launches are left out; operators of our
own are looked into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_attention.attention import NSAttention
from nsa_attention.config import Implementation
from nsa_attention.ops import NAMESPACE, dispatch, input_validation, rotary, selection, table_cache
from nsa_attention.ops.fused import gated_attention, importance, launch, lists, mix, selected, spanned
from nsa_attention.ops.fused import rotary as fused_rotary
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

META = torch.device("meta")
L, D, TOKENS, STARTS = 32, 16, 2048, (0, 1000, 2048)
OPERATORS = {
    operator._name: operator
    for module in (gated_attention, mix, rotary, selected, selection, spanned)
    for operator in vars(module).values()
    if type(operator).__name__ == "CustomOpDef"
}
# Reading a value, and what has as many elements as the values say: the host would wait for the device.
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique_consecutive", "_unique2", "equal"}
# What makes no kernel of the device: views of what is there, and room for what comes.
FREE = {
    *("view", "_unsafe_view", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "expand", "detach"),
    *("alias", "as_strided", "unflatten", "flatten", "reshape", "promote_types", "add_"),
    *("t", "split", "split_with_sizes", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}

LAUNCHES = 15  # forward and backward, all branches


class WouldWait(Exception):
    """The host asked for what only the device knows."""


class Host(TorchDispatchMode):
    """Counts what the host asks of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        _types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        name = function.__name__.split(".")[0]
        if function.namespace == NAMESPACE and name in OPERATORS:
            with self:
                return OPERATORS[name]._init_fn(*arguments, **(options or {}))
        if name in WAITING or (name == "_to_copy" and (options or {}).get("device") == torch.device("cpu")):
            raise WouldWait(name)
        self.asked[name] += name not in FREE
        return function(*arguments, **(options or {}))


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table_cache.clear_cache()
    for module in (importance, fused_rotary, lists, mix, selected, spanned):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    monkeypatch.setattr(dispatch, "triton_reason", lambda *_: None)
    monkeypatch.setattr(dispatch, "_triton", FusedBackend)


def one_pass(starts: Tensor | None, device: torch.device = META) -> Callable[[], None]:
    """Forward and backward of the whole operation, on the same tensors each time."""

    def leaf(heads: int, length: int) -> Tensor:
        return torch.zeros(1, heads, length, 16, dtype=torch.float16, device=device, requires_grad=True)

    lengths = [TOKENS] if starts is None else [stop - start for start, stop in pairwise(STARTS)]
    blocks = sum((length - L) // D + 1 for length in lengths)
    pairs = {"compressed": blocks, "selected": TOKENS, "sliding": TOKENS}
    branches = KeysAndValues(**{name: (leaf(2, length), leaf(2, length)) for name, length in pairs.items()})
    q, gates = leaf(4, TOKENS), torch.zeros(3, 1, 4, TOKENS, dtype=torch.float16, device=device, requires_grad=True)
    numbers = Selection(block_len=L, block_stride=D, select_len=64, select_count=16, scale=0.25)

    def run() -> None:
        output = sparse_attention(
            q, branches, gates, numbers, window=512, implementation=Implementation.TRITON, cu_seqlens=starts
        )
        output.backward(torch.empty_like(output))

    return run


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_a_pass_waits_for_no_value_of_the_device(packed: bool) -> None:
    run = one_pass(torch.empty(3, dtype=torch.int32, device=META) if packed else None)
    for _ in range(2):  # the second finds kept what the first computed
        with Host() as host:
            run()
    assert host.asked


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_a_pass_is_few_operations_of_the_host(packed: bool) -> None:
    """Below some thousand tokens it is the host that a pass waits for. The first of a length computes what is kept."""
    run = one_pass(torch.empty(3, dtype=torch.int32, device=META) if packed else None)
    for _ in range(2):
        with Host() as host:
            run()
    assert host.asked.total() <= 60 - LAUNCHES


def test_rotary_embeddings_of_a_layer_are_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a whole layer; the launches of both passes are 19."""
    with META:
        layer = NSAttention(64, 4, 1, dtype=torch.float16)
        x = torch.empty(1, TOKENS, 64, dtype=torch.float16, requires_grad=True)

    def counted() -> Counter[str]:
        for _ in range(2):
            with Host() as host:
                layer(x).sum().backward()
        return host.asked

    ours = counted()
    monkeypatch.setattr(rotary, "rotates_in_triton", lambda *_: False)
    products = counted()
    assert ours.total() <= 90
    # Of each of four tensors four products, two sums and the joining of the halves, and about as much backward.
    assert products.total() - ours.total() >= 4 * 14


def test_a_dimension_of_one_is_no_variant_of_a_kernel() -> None:
    """Whatever torch says of its stride, which may be beyond 32 bits for a long sequence."""
    rows = torch.empty(1, device=META).as_strided((1, 2, 3, 16), (2**40, 48, 16, 1))
    assert launch.with_strides(rows)[1:] == (0, 48, 16)
    assert launch.with_strides(rows[:, :1, :1])[1:] == (0, 0, 0)


def test_checking_starts_on_a_gpu_waits_for_none_of_their_values() -> None:
    with Host() as host:
        input_validation.assert_cu_seqlens_async(torch.empty(3, dtype=torch.int32, device=META), TOKENS, 9, L, D)
    assert host.asked["_assert_async"] == 1


def test_a_host_that_waits_is_noticed() -> None:
    for wait in (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, bool):
        # Of some torch itself says that there is no value.
        with pytest.raises((WouldWait, RuntimeError)), Host():
            wait(torch.ones(1, device=META))
