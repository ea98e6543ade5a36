"""What the whole operation refuses, all at once and the same for every implementation, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_attention import nsa_func
from nsa_attention.config import Implementation
from nsa_attention.ops import input_validation
from nsa_attention.ops.packed import compressed_starts

LENGTHS: dict[str, Any] = {
    "block_size": 5,
    "block_count": 4,
    "compress_size": 6,
    "compress_stride": 3,
    "window": 7,
    "scale": 0.5,
}
EVERYONE = [
    Implementation.AUTO,
    Implementation.EAGER,
    Implementation.DENSE,
    Implementation.PER_TOKEN,
    Implementation.TRITON,
]
Inputs = dict[str, Tensor]


def inputs(tokens: int = 23, blocks: int = 6, dtype: torch.dtype = torch.float32) -> Inputs:
    """Queries of two heads, keys and values of one head with different widths, and gates."""
    tensors = {"q": torch.randn(1, tokens, 2, 4, dtype=dtype)}
    for branch, length in (("cmp", blocks), ("slc", tokens), ("win", tokens)):
        tensors[f"k_{branch}"] = torch.randn(1, length, 1, 4, dtype=dtype)
        tensors[f"v_{branch}"] = torch.randn(1, length, 1, 3, dtype=dtype)
    return tensors | {f"g_{branch}": torch.rand(1, tokens, 2, dtype=dtype) for branch in ("cmp", "slc", "swa")}


def refused(given: Inputs, implementation: str = "auto", **more: Any) -> str:
    """What the error says."""
    with pytest.raises(ValueError, match=r"^nsa_func: ") as error:
        nsa_func(**given, **LENGTHS | {"implementation": implementation} | more)
    return str(error.value).removeprefix("nsa_func: ")


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize("blocks", [5, 7], ids=["short", "long"])
def test_as_many_compressed_blocks_as_the_tokens_have(implementation: Implementation, blocks: int) -> None:
    """With one too few the kernels would read what lies behind the tensor."""
    assert refused(inputs(blocks=blocks), implementation) == (
        f"k_cmp: expected the 6 complete blocks of 23 tokens (compress_size 6, compress_stride 3), got {blocks}"
    )


def test_fewer_tokens_than_a_block_have_none() -> None:
    assert "expected the 0 complete blocks of 5 tokens" in refused(inputs(tokens=5, blocks=1))
    assert nsa_func(**inputs(tokens=5, blocks=0), **LENGTHS).shape == (1, 5, 2, 3)


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
            "k_cmp: expected the 5 complete blocks of all sequences of cu_seqlens (compress_size 6, "
            "compress_stride 3), got 6",
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
        (torch.tensor([0, 23]), "expected torch.int32 (cu_seqlens.int()), got torch.int64"),
        (torch.tensor([0, 9, 23, 9], dtype=torch.int32)[::2], "expected it contiguous, got a stride of 2"),
        (torch.tensor([0, 23], dtype=torch.int32, device="meta"), "expected cpu as q, got meta"),
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
        lambda of: of | {name: of[name].half() for name in ("k_win", "v_win")},
        "k_win: expected torch.float32 as q, got torch.float16; v_win: expected torch.float32 as q, got torch.float16",
    ),
    "device": (lambda of: of | {"k_slc": of["k_slc"].to("meta")}, "k_slc: expected cpu as q, got meta"),
    "width of values": (
        lambda of: of | {"v_win": of["k_win"]},
        "v_win: expected the shape [1, 23, 1, 3], got [1, 23, 1, 4]",
    ),
    "heads before tokens": (
        lambda of: of | {"k_slc": of["k_slc"].transpose(1, 2)},
        "k_slc: expected the shape [1, 23, 1, 4], got [1, 1, 23, 4]; did you mean .transpose(1, 2)?",
    ),
    "gates": (
        lambda of: of | {"g_slc": of["g_slc"][:, :9].bool().to("meta"), "g_swa": of["g_swa"].double()},
        "g_slc: expected the shape [1, 23, 2], got [1, 9, 2]; g_slc: expected floats, got torch.bool; "
        "g_slc: expected cpu as q, got meta; g_swa: expected torch.float32 as g_cmp, got torch.float64",
    ),
    "groups": (
        lambda of: {
            name: torch.cat([one, one[:, :, :1]], 2) if name[0] in "qg" else one.expand(-1, -1, 2, -1)
            for name, one in of.items()
        },
        "v_slc: expected a number of heads that divides the 3 heads of q, got 2",
    ),
    "queries": (
        lambda of: of | {"q": of["q"].long()},
        "q: expected floats [B, T, H, D] with a head and a width, got torch.int64 [1, 23, 2, 4]",
    ),
    "queries and more": (
        lambda of: of | {"q": of["q"][0], "v_win": of["v_win"][0], "g_cmp": of["g_cmp"].long()},
        "q: expected floats [B, T, H, D] with a head and a width, got torch.float32 [23, 2, 4]; "
        "v_win: expected floats [B, T, G, D], got torch.float32 [23, 1, 3]; "
        "g_cmp: expected floats [B, T, H], got torch.int64 [1, 23, 2]",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_tensors_are_of_one_dtype_device_and_shape(wrong: Callable[[Inputs], Inputs], said: str) -> None:
    assert refused(wrong(inputs())) == said


def test_what_is_no_tensor_is_named() -> None:
    wrong: Any = inputs() | {"k_cmp": None, "g_swa": 0.5}
    assert refused(wrong, window=0, cu_seqlens=[0, 23]).split("; ") == [
        "window: expected at least 1, got 0",
        "k_cmp: expected a tensor, got None",
        "g_swa: expected a tensor, got float",
        "cu_seqlens: expected a tensor, got list",
    ]


def test_all_mistakes_are_told_at_once() -> None:
    of = inputs(blocks=3)
    starts = torch.tensor([1, 23])
    given = of | {"g_swa": of["g_swa"][:, :9], "v_cmp": of["v_cmp"][:, :2]}
    assert refused(given, window=0, cu_seqlens=starts, block_count=2, scale=float("inf")).split("; ") == [
        "window: expected at least 1, got 0",
        "block_count: expected at least 3 (block 0, the current and the previous one are always chosen), got 2",
        "scale: expected a finite number, got inf",
        "v_cmp: expected the shape [1, 3, 1, 3], got [1, 2, 1, 3]",
        "g_swa: expected the shape [1, 23, 2], got [1, 9, 2]",
        "cu_seqlens: expected torch.int32 (cu_seqlens.int()), got torch.int64",
        "cu_seqlens: expected it from 0 to T = 23, got 1 to 23",
    ]


def test_packed_sequences_lie_in_one_row() -> None:
    given = {name: one.expand(2, *one.shape[1:]) for name, one in inputs(tokens=5, blocks=0).items()}
    starts = torch.tensor([0, 5], dtype=torch.int32)
    assert refused(given, cu_seqlens=starts) == "cu_seqlens: expected a batch of 1, all sequences in one row, got 2"


@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (
            {"block_count": 2},
            "block_count: expected at least 3 (block 0, the current and the previous one are always",
        ),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"compress_stride": 0}, "compress_stride: expected at least 1, got 0"),
        ({"compress_size": 2}, "compress_stride: expected at most compress_size (2), got 3: tokens between two blocks"),
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ],
    ids=["n", "l'", "d", "d > l", "scale"],
)
def test_numbers_are_those_of_a_shape(implementation: Implementation, numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^nsa_func: {re.escape(said)}"):
        nsa_func(**inputs(), **LENGTHS | numbers, implementation=implementation)


def test_an_implementation_is_one_that_exists() -> None:
    assert refused(inputs(), "cuda") == (
        "implementation: expected auto, eager, triton, torch, flash, per_token, dense, got 'cuda'"
    )


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("implementation", EVERYONE, ids=str)
def test_no_token_gives_no_output_and_gradients_without_an_element(
    implementation: Implementation, packed: bool
) -> None:
    given = inputs(tokens=0, blocks=0, dtype=torch.float16)
    given |= {name: one.float() for name, one in given.items() if name.startswith("g_")}
    leaves = [leaf.requires_grad_() for leaf in given.values()]
    starts = torch.zeros(3, dtype=torch.int32) if packed else None
    output = nsa_func(**given, **LENGTHS, implementation=implementation, cu_seqlens=starts)
    assert (output.shape, output.dtype) == ((1, 0, 2, 3), torch.float16)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert [one.shape for one in gradients] == [one.shape for one in leaves]


def test_strides_may_be_any() -> None:
    given = inputs()
    turned = {
        name: one.transpose(-1, -2).contiguous().transpose(-1, -2) for name, one in given.items() if "slc" not in name
    }
    for implementation in EVERYONE:
        ours, theirs = (nsa_func(**of, **LENGTHS, implementation=implementation) for of in (given, given | turned))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.EAGER], ids=str)
def test_a_compiled_operation_checks_the_starts_that_it_is_called_with(implementation: Implementation) -> None:
    def run(starts: Tensor) -> Tensor:
        return nsa_func(**given, **LENGTHS, implementation=implementation, cu_seqlens=starts)

    given = inputs(blocks=5)
    right, wrong = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 10, 23], [0, 21, 23]))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(right), run(right))
    with pytest.raises(ValueError, match="expected the 6 complete blocks of all sequences"):
        compiled(wrong)


@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.EAGER], ids=str)
def test_a_compiled_operation_checks_tensors_of_any_length(implementation: Implementation) -> None:
    def run(given: Inputs) -> Tensor:
        return nsa_func(**given, **LENGTHS, implementation=implementation)

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
    given = inputs(tokens=9, blocks=2, dtype=dtype)
    given |= {name: one.to(gates) for name, one in given.items() if name.startswith("g_")}
    output = nsa_func(**given, **LENGTHS, implementation=implementation)
    assert output.dtype == dtype


def test_lengths_of_another_type_are_mistakes() -> None:
    assert refused(inputs(), window=32.0, block_count="4", compress_size=4.5, scale=float("inf")) == (
        "compress_size: expected an integer, got 4.5; window: expected an integer, got 32.0; "
        "block_count: expected an integer, got '4'; scale: expected a finite number, got inf"
    )
