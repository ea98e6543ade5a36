"""What the whole operation refuses, all at once and the same for every implementation, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_attention.config import Implementation
from nsa_attention.ops import input_validation
from nsa_attention.ops.packed import compressed_starts
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

SELECTION = Selection(block_len=6, block_stride=3, select_len=5, select_count=4, scale=0.5)
EVERYONE = [
    Implementation.AUTO,
    Implementation.EAGER,
    Implementation.DENSE,
    Implementation.PER_TOKEN,
    Implementation.TRITON,
]
Inputs = tuple[Tensor, KeysAndValues, Tensor]


def inputs(tokens: int = 23, blocks: int = 6, dtype: torch.dtype = torch.float32) -> Inputs:
    def pair(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 1, length, 4, dtype=dtype), torch.randn(1, 1, length, 3, dtype=dtype)

    branches = KeysAndValues(compressed=pair(blocks), selected=pair(tokens), sliding=pair(tokens))
    return torch.randn(1, 2, tokens, 4, dtype=dtype), branches, torch.rand(3, 1, 2, tokens, dtype=dtype)


def refused(given: Inputs, implementation: Implementation = Implementation.AUTO, **more: Any) -> str:
    """What the error says."""
    with pytest.raises(ValueError, match=r"^sparse_attention: ") as error:
        sparse_attention(*given, SELECTION, **{"window": 7, "implementation": implementation} | more)
    return str(error.value).removeprefix("sparse_attention: ")


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize("blocks", [5, 7], ids=["short", "long"])
def test_as_many_compressed_blocks_as_the_tokens_have(implementation: Implementation, blocks: int) -> None:
    """With one too few the kernels would read what lies behind the tensor."""
    assert refused(inputs(blocks=blocks), implementation) == (
        f"branches.compressed: expected the 6 complete blocks of 23 tokens (block_len 6, block_stride 3), got {blocks}"
    )


def test_fewer_tokens_than_a_block_have_none() -> None:
    assert "expected the 0 complete blocks of 5 tokens" in refused(inputs(tokens=5, blocks=1))
    q, branches, gates = inputs(tokens=5, blocks=0)
    assert sparse_attention(q, branches, gates, SELECTION, window=7).shape == (1, 5, 2, 3)


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([0, 10], "cu_seqlens: expected it from 0 to T = 23, got 0 to 10"),
        ([0, 30], "cu_seqlens: expected it from 0 to T = 23, got 0 to 30"),
        ([5, 23], "cu_seqlens: expected it from 0 to T = 23, got 5 to 23"),
        ([0, 20, 10, 23], "cu_seqlens: expected it ascending, got 20 before 10 at place 1"),
        (
            [0, 3, 23],
            "branches.compressed: expected the 5 complete blocks of all sequences of cu_seqlens (block_len 6, "
            "block_stride 3), got 6",
        ),
        ([23], "cu_seqlens: expected [sequences + 1], two numbers at least, got [1]"),
    ],
    ids=["short", "long", "late", "falling", "S too large", "one number"],
)
def test_starts_of_packed_sequences_fill_the_row(implementation: Implementation, starts: list[int], said: str) -> None:
    assert refused(inputs(), implementation, cu_seqlens=torch.tensor(starts, dtype=torch.int32)) == said


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (torch.tensor([0, 23]), "expected torch.int32, got torch.int64"),
        (torch.tensor([0, 9, 23, 9], dtype=torch.int32)[::2], "expected it contiguous, got a stride of 2"),
        (torch.tensor([0, 23], dtype=torch.int32, device="meta"), "expected cpu as q_BHTD, got meta"),
        (torch.tensor([[0, 23]], dtype=torch.int32), "expected [sequences + 1], two numbers at least, got [1, 2]"),
    ],
    ids=["int64", "strided", "elsewhere", "a matrix"],
)
def test_starts_are_int32_in_a_row_and_where_the_queries_are(starts: Tensor, said: str) -> None:
    assert refused(inputs(), cu_seqlens=starts) == f"cu_seqlens: {said}"


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), off=st.sampled_from([-1, 1, 2]))
def test_the_blocks_of_starts_are_those_that_the_operations_count(lengths: list[int], off: int) -> None:
    starts = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    blocks = int(compressed_starts(torch.tensor(starts, dtype=torch.int32), 6, 3)[-1])
    assert input_validation.cu_seqlens_problems(starts, starts[-1], blocks, 6, 3) == []
    assert len(input_validation.cu_seqlens_problems(starts, starts[-1], blocks + off, 6, 3)) == 1
    assert input_validation.cu_seqlens_problems(starts, starts[-1] + off, blocks, 6, 3)


WRONG: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "dtype": (
        lambda given: (given[0], replace(given[1], sliding=tuple(one.half() for one in given[1].sliding)), given[2]),
        "branches.sliding keys: expected torch.float32 as q_BHTD, got torch.float16; "
        "branches.sliding values: expected torch.float32 as q_BHTD, got torch.float16",
    ),
    "device": (
        lambda given: (
            given[0],
            replace(given[1], selected=(given[1].selected[0].to("meta"), given[1].selected[1])),
            given[2],
        ),
        "branches.selected keys: expected cpu as q_BHTD, got meta",
    ),
    "width of values": (
        lambda given: (given[0], replace(given[1], sliding=(given[1].sliding[0], given[1].sliding[0])), given[2]),
        "branches.sliding values: expected the shape [1, 1, 23, 3], got [1, 1, 23, 4]",
    ),
    "gates": (
        lambda given: (*given[:2], given[2][:2].bool().to("meta")),
        "gates_cBHT: expected the shape [3, 1, 2, 23], got [2, 1, 2, 23]; gates_cBHT: expected floats, got torch.bool; "
        "gates_cBHT: expected cpu as q_BHTD, got meta",
    ),
    "groups": (
        lambda given: (
            torch.cat([given[0], given[0][:, :1]], 1),
            replace(
                given[1],
                **{
                    name: tuple(one.expand(-1, 2, -1, -1) for one in getattr(given[1], name))
                    for name in input_validation.BRANCHES
                },
            ),
            torch.rand(3, 1, 3, 23),
        ),
        "branches.selected: expected groups that share 3 query heads evenly, got 2",
    ),
    "queries": (
        lambda given: (given[0].long(), *given[1:]),
        "q_BHTD: expected floats [B, H, T, D] with a head and a width, got torch.int64 [1, 2, 23, 4]",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_tensors_are_of_one_dtype_device_and_shape(wrong: Callable[[Inputs], Inputs], said: str) -> None:
    assert refused(wrong(inputs())) == said


def test_all_mistakes_are_told_at_once() -> None:
    q, branches, gates = inputs(blocks=3)
    starts = torch.tensor([1, 23])
    assert refused((q, branches, gates[:, :, :, :9]), window=0, cu_seqlens=starts).split("; ") == [
        "window: expected at least 1, got 0",
        "gates_cBHT: expected the shape [3, 1, 2, 23], got [3, 1, 2, 9]",
        "cu_seqlens: expected torch.int32, got torch.int64",
        "cu_seqlens: expected it from 0 to T = 23, got 1 to 23",
    ]


def test_packed_sequences_lie_in_one_row() -> None:
    two, branches, gates = inputs(tokens=5, blocks=0)
    pairs = {
        name: tuple(one.expand(2, -1, -1, -1) for one in getattr(branches, name)) for name in input_validation.BRANCHES
    }
    given = two.expand(2, -1, -1, -1), KeysAndValues(**pairs), gates.expand(-1, 2, -1, -1)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    assert refused(given, cu_seqlens=starts) == "cu_seqlens: expected a batch of 1, all sequences in one row, got 2"


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (
            {"select_count": 2},
            "select_count: expected at least 3 (block 0, the current and the previous one are always",
        ),
        ({"select_len": 0}, "select_len: expected at least 1, got 0"),
        ({"block_stride": 0}, "block_stride: expected at least 1, got 0"),
        ({"block_len": 2}, "block_stride: expected at most block_len (2), got 3: tokens between two blocks would"),
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ],
    ids=["n", "l'", "d", "d > l", "scale"],
)
def test_numbers_are_those_of_a_shape(implementation: Implementation, numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^sparse_attention: selection\.{re.escape(said)}"):
        sparse_attention(*inputs(), replace(SELECTION, **numbers), window=7, implementation=implementation)


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
def test_no_token_gives_no_output_and_gradients_without_an_element(
    implementation: Implementation, packed: bool
) -> None:
    q, branches, gates = inputs(tokens=0, blocks=0, dtype=torch.float16)
    leaves = [q, gates.float(), *branches.compressed, *branches.selected, *branches.sliding]
    for leaf in leaves:
        leaf.requires_grad_()
    starts = torch.zeros(3, dtype=torch.int32) if packed else None
    given = q, branches, leaves[1]
    output = sparse_attention(*given, SELECTION, window=7, implementation=implementation, cu_seqlens=starts)
    assert (output.shape, output.dtype) == ((1, 0, 2, 3), torch.float16)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert [one.shape for one in gradients] == [one.shape for one in leaves]


def test_strides_may_be_any() -> None:
    q, branches, gates = inputs()
    turned = [
        one.transpose(-1, -2).contiguous().transpose(-1, -2) for one in (q, *branches.compressed, *branches.sliding)
    ]
    other = replace(branches, compressed=tuple(turned[1:3]), sliding=tuple(turned[3:]))
    for implementation in EVERYONE:
        ours, theirs = (
            sparse_attention(q_, kv, gates, SELECTION, window=7, implementation=implementation)
            for q_, kv in ((q, branches), (turned[0], other))
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.EAGER], ids=str)
def test_a_compiled_operation_checks_the_starts_that_it_is_called_with(implementation: Implementation) -> None:
    def run(starts: Tensor) -> Tensor:
        return sparse_attention(*given, SELECTION, window=7, implementation=implementation, cu_seqlens=starts)

    given = inputs(blocks=5)
    right, wrong = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 10, 23], [0, 21, 23]))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(right), run(right))
    with pytest.raises(ValueError, match="expected the 6 complete blocks of all sequences"):
        compiled(wrong)


@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.EAGER], ids=str)
def test_a_compiled_operation_checks_tensors_of_any_length(implementation: Implementation) -> None:
    def run(given: Inputs) -> Tensor:
        return sparse_attention(*given, SELECTION, window=7, implementation=implementation)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for tokens, blocks in ((23, 6), (26, 7), (41, 12)):  # from the second on lengths are symbols
        given = inputs(tokens, blocks)
        torch.testing.assert_close(compiled(given), run(given))
    with pytest.raises(Exception, match="expected the 8 complete blocks of 29 tokens"):
        compiled(inputs(29, 9))


class TestOnADevice:
    """What a GPU is asked to assert, tried on a CPU, where the same operator raises at once."""

    @pytest.mark.parametrize("starts", [[0, 10], [1, 23], [0, 20, 10, 23], [0, 3, 23]], ids=str)
    def test_values_that_do_not_fit_are_asserted(self, starts: list[int]) -> None:
        with pytest.raises(RuntimeError, match=r"cu_seqlens: expected it ascending from 0 to T = 23 with 6 complete"):
            input_validation.assert_cu_seqlens_async(torch.tensor(starts, dtype=torch.int32), 23, 6, 6, 3)

    @given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def test_values_that_fit_are_not(self, lengths: list[int]) -> None:
        starts = torch.tensor([sum(lengths[:end]) for end in range(len(lengths) + 1)], dtype=torch.int32)
        blocks = int(compressed_starts(starts, 6, 3)[-1])
        input_validation.assert_cu_seqlens_async(starts, int(starts[-1]), blocks, 6, 3)
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            input_validation.assert_cu_seqlens_async(starts, int(starts[-1]), blocks + 1, 6, 3)


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize("gates", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_output_is_of_the_dtype_of_the_branches_whatever_that_of_the_gates(
    implementation: Implementation, gates: torch.dtype, dtype: torch.dtype
) -> None:
    q, branches, ones = inputs(tokens=9, blocks=2, dtype=dtype)
    output = sparse_attention(q, branches, ones.to(gates), SELECTION, window=7, implementation=implementation)
    assert output.dtype == dtype
