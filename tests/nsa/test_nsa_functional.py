"""The functions for other people's models: `nsa_func` equals the reference, and shapes are those of flash-attn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nsa_reference as reference
import pytest
import torch
from torch import Tensor

from nsa_attention import compress_mean, functional, nsa_func
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues

TOKENS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 29, 4, 2, 6, 5
LENGTHS: dict[str, Any] = {
    "block_size": 5,
    "block_count": 4,
    "compress_size": 6,
    "compress_stride": 3,
    "window": 7,
}
NAMES = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "g_cmp", "g_slc", "g_swa")


def leaves(batch: int = 2, tokens: int = TOKENS, blocks: int | None = None) -> list[Tensor]:
    """The ten tensors in float64; keys and values have different widths."""
    blocks = max(0, (tokens - 6) // 3 + 1) if blocks is None else blocks
    shapes = [(batch, tokens, HEADS, WIDTH)]
    for length in (blocks, tokens, tokens):
        shapes += [(batch, length, KV_HEADS, WIDTH), (batch, length, KV_HEADS, VALUE_WIDTH)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    tensors += [torch.rand(batch, tokens, HEADS, dtype=torch.float64) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def by_the_reference(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, *gates: Tensor
) -> Tensor:
    """The gated sum from plain loops over queries, one sequence at a time."""
    outputs = []
    for number in range(q.shape[0]):
        q_HTD, *pairs = (one[number].transpose(0, 1) for one in (q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win))
        blocks = {"block_len": 6, "block_stride": 3}
        importance = reference.importance(q_HTD.detach(), pairs[0].detach(), **blocks, select_len=5)
        indices = reference.select_blocks(importance, select_len=5, select_count=4)
        branches = (
            reference.compressed_attention(q_HTD, *pairs[:2], **blocks)[0],
            reference.selected_attention(q_HTD, *pairs[2:4], indices, select_len=5)[0],
            reference.sliding_attention(q_HTD, *pairs[4:], window=7)[0],
        )
        rows = [gate[number, ..., None] * o_HTE.transpose(0, 1) for gate, o_HTE in zip(gates, branches, strict=True)]
        outputs.append(sum(rows[1:], rows[0]))
    return torch.stack(outputs)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "eager", "triton"])
def test_output_and_all_ten_gradients_are_those_of_the_reference(implementation: str, deterministic: bool) -> None:
    tensors = leaves()
    weight = torch.randn(2, TOKENS, HEADS, VALUE_WIDTH, dtype=torch.float64)
    ours = nsa_func(*tensors, **LENGTHS, implementation=implementation, deterministic=deterministic)
    theirs = by_the_reference(*tensors)
    assert ours.shape == (2, TOKENS, HEADS, VALUE_WIDTH)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    our_gradients, their_gradients = (torch.autograd.grad((o * weight).sum(), tensors) for o in (ours, theirs))
    for name, our, their in zip(NAMES, our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_the_scale_may_be_another() -> None:
    q, *rest = leaves()
    ours = nsa_func(q, *rest, **LENGTHS, scale=0.3)
    torch.testing.assert_close(ours, nsa_func(q * 0.3 * WIDTH**0.5, *rest, **LENGTHS), rtol=0, atol=1e-10)


def test_the_defaults_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    given = recorded_call(monkeypatch, leaves(1, 64, (64 - 32) // 16 + 1))
    assert given["args"][3] == Selection(
        block_len=32, block_stride=16, select_len=64, select_count=16, scale=WIDTH**-0.5
    )
    assert given["window"] == 512
    assert given["deterministic"]


def test_queries_keys_and_values_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = leaves()
    q, branches, gates, _ = recorded_call(monkeypatch, tensors, **LENGTHS)["args"]
    assert isinstance(branches, KeysAndValues)
    received = [q, *branches.compressed, *branches.selected, *branches.sliding]
    assert [one.data_ptr() for one in received] == [one.data_ptr() for one in tensors[:7]]
    assert gates.shape == (3, 2, HEADS, TOKENS)


def recorded_call(monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor], **lengths: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    monkeypatch.setattr(functional, "sparse_attention", lambda *args, **rest: given.update(args=args, **rest))
    nsa_func(*tensors, **lengths)
    return given


@pytest.mark.parametrize("implementation", ["auto", "eager", "triton"])
def test_packed_sequences_are_those_alone(implementation: str) -> None:
    lengths = [9, 1, 14, 5]
    starts = torch.tensor([0, 9, 10, 24, 29], dtype=torch.int32)
    k, v, *others = (torch.randn(1, 29, KV_HEADS, WIDTH, dtype=torch.float64) for _ in range(6))
    q = torch.randn(1, 29, HEADS, WIDTH, dtype=torch.float64)
    gates = [torch.rand(1, 29, HEADS, dtype=torch.float64) for _ in range(3)]

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        compressed = (compress_mean(one, 6, 3, cu_seqlens) for one in (k, v))
        return nsa_func(q, *compressed, *rest, **LENGTHS, cu_seqlens=cu_seqlens, implementation=implementation)

    packed = run(q, k, v, *others, *gates, cu_seqlens=starts)
    parts = zip(*(one.split(lengths, 1) for one in (q, k, v, *others, *gates)), strict=True)
    torch.testing.assert_close(packed, torch.cat([run(*part) for part in parts], 1), rtol=0, atol=1e-10)


def test_is_compiled_without_a_graph_break() -> None:
    def run(x: Tensor, k: Tensor, gate: Tensor) -> Tensor:
        blocks = compress_mean(k, 6, 3)
        return nsa_func(x, blocks, blocks, k, k, k, k, gate, gate, gate, **LENGTHS)

    def inputs(tokens: int) -> list[Tensor]:
        shapes = (1, tokens, HEADS, 8), (1, tokens, KV_HEADS, 8), (1, tokens, HEADS)
        return [torch.randn(shape, requires_grad=True) for shape in shapes]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for tokens in (29, 31, 50):  # from the second on, lengths are symbols
        given = inputs(tokens)
        torch.testing.assert_close(compiled(*given), run(*given))
        ours, theirs = (torch.autograd.grad(one(*given).square().sum(), given) for one in (compiled, run))
        torch.testing.assert_close(ours, theirs)


class TestCompressMean:
    """`compress_mean`: one mean for each complete block of tokens."""

    @pytest.mark.parametrize("tokens", [0, 5, 6, 8, 9, 29])
    def test_a_block_is_the_mean_of_its_tokens(self, tokens: int) -> None:
        x = torch.randn(2, tokens, KV_HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
        means = compress_mean(x, 6, 3)
        assert means.shape[1] == len(range(0, tokens - 5, 3))
        for number, block in enumerate(means.unbind(1)):
            torch.testing.assert_close(block, x[:, 3 * number : 3 * number + 6].mean(1))
        assert torch.autograd.grad(means.sum(), x)[0].shape == x.shape

    def test_no_block_spans_two_sequences(self) -> None:
        x = torch.arange(20.0).view(1, 20, 1, 1).requires_grad_()
        starts = torch.tensor([0, 7, 7, 9, 20], dtype=torch.int32)
        means = compress_mean(x, 4, 2, starts)
        assert means.flatten().tolist() == [1.5, 3.5, 10.5, 12.5, 14.5, 16.5]
        gradient = torch.autograd.grad(means.sum(), x)[0].flatten()
        assert gradient.tolist() == [0.25, 0.25, 0.5, 0.5, 0.25, 0.25] + [0] * 3 + [0.25, 0.25] + [0.5] * 6 + [
            0.25,
            0.25,
            0,
        ]

    def test_starts_are_read_once_for_all_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = []
        read = Tensor.tolist
        monkeypatch.setattr(Tensor, "tolist", lambda one: reads.append(one) or read(one))
        x, starts = torch.randn(1, 9, 1, 2), torch.tensor([0, 9], dtype=torch.int32)
        first, second = (compress_mean(x, 4, 2, starts) for _ in range(2))
        assert torch.equal(first, second)
        assert len(reads) == 1

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (
                lambda x: compress_mean(x[0], 0, 3),
                "compress_size: expected at least 1, got 0; compress_stride: expected at most compress_size (0), got "
                "3: tokens between two blocks would belong to none; x: expected floats [B, T, G, D], got torch.float32 "
                "[9, 1, 2]",
            ),
            (
                lambda x: compress_mean(x.expand(2, -1, -1, -1), 4, 2, torch.tensor([0, 9])),
                "cu_seqlens: expected a batch of 1, all sequences in one row, got 2; "
                "cu_seqlens: expected torch.int32 (cu_seqlens.int()), got torch.int64",
            ),
            (
                lambda x: compress_mean(x, 4, 2, torch.tensor([0, 5, 3], dtype=torch.int32)),
                "cu_seqlens: expected it from 0 to T = 9, got 0 to 3; "
                "cu_seqlens: expected it ascending, got 5 before 3 at place 1",
            ),
        ],
        ids=["numbers and x", "starts", "values of starts"],
    )
    def test_all_mistakes_are_told_at_once(self, wrong: Callable[[Tensor], Tensor], said: str) -> None:
        with pytest.raises(ValueError, match=r"^compress_mean: ") as error:
            wrong(torch.randn(1, 9, 1, 2))
        assert str(error.value) == f"compress_mean: {said}"
