"""Selected attention that visits each block of keys once, with the queries that chose it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_attention.ops import blockwise
from nsa_attention.ops.attend import selected_attention
from nsa_attention.ops.blockwise import block_readers
from nsa_attention.ops.kernels import BlockwiseKernel, EagerKernel, FusedCpuKernel, Kernel
from nsa_attention.ops.selection import EMPTY, Selection, select_blocks

TOLERANCE = 1e-10


def attended(*tensors: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    return selected_attention(*tensors, select_len=4, scale=0.5, kernel=kernel)


def inputs(dtype: torch.dtype, *, width: int = 8) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, 6, 61, 8), torch.randn(2, 2, 61, 8)
    indices = select_blocks(
        q, k[:, :, 3::4], Selection(block_len=4, block_stride=4, select_len=4, select_count=5, scale=0.5)
    )
    return *(t.to(dtype).requires_grad_() for t in (q, k, torch.randn(2, 2, 61, width))), indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_as_near_to_float64_as_under_a_mask(dtype: torch.dtype) -> None:
    *tensors, indices = inputs(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    upstream = torch.randn(2, 6, 61, 8)
    results = []
    for leaves, kernel in ((tensors, BlockwiseKernel()), (tensors, FusedCpuKernel()), (exact, EagerKernel())):
        output, lse = attended(*leaves, indices, kernel=kernel)
        assert lse.dtype is (torch.float64 if leaves is exact else torch.float32)
        results.append([output.detach(), lse, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))])
    for ours, masked, truth in zip(*results, strict=True):
        assert ours.dtype is masked.dtype
        error, allowed = (float((each.double() - truth).abs().max()) for each in (ours, masked))
        assert error <= 2 * allowed + 1e-6


def test_chunks_of_any_length_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    *tensors, indices = inputs(torch.float64)
    upstream = torch.randn(2, 6, 61, 8, dtype=torch.float64)

    def run() -> list[Tensor]:
        output, lse = attended(*tensors, indices, kernel=BlockwiseKernel())
        return [output, lse, *torch.autograd.grad(output, tensors, upstream)]

    whole = run()
    # Shorter than a block: a block's own queries, who do not see all of it, come in several chunks.
    for longest in (3, 9, 15):  # of three heads: 1, 3 and 5 queries
        monkeypatch.setattr(blockwise, "MAX_CHUNK_ROWS", longest)
        for ours, theirs in zip(run(), whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_values_may_be_wider_than_keys() -> None:
    *tensors, indices = inputs(torch.float64, width=11)
    upstream = torch.randn(2, 6, 61, 11, dtype=torch.float64)
    ours, theirs = (
        [*outputs, *torch.autograd.grad(outputs[0], tensors, upstream)]
        for outputs in (attended(*tensors, indices, kernel=kernel) for kernel in (BlockwiseKernel(), EagerKernel()))
    )
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


def test_two_runs_are_equal_bit_for_bit() -> None:
    *tensors, indices = inputs(torch.float32)
    upstream = torch.randn(2, 6, 61, 8)
    first, second = (
        [*outputs, *torch.autograd.grad(outputs[0], tensors, upstream)]
        for outputs in (attended(*tensors, indices, kernel=BlockwiseKernel()) for _ in range(2))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_huge_logits_stay_finite() -> None:
    q, k, v, indices = inputs(torch.float32)
    leaves = [(tensor.detach() * 1e4).requires_grad_() for tensor in (q, k)] + [v]
    output, lse = attended(*leaves, indices, kernel=BlockwiseKernel())
    for tensor in (output, lse, *torch.autograd.grad(output.sum(), leaves)):
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("largest", [39.0, 41.0, 4000.0])
def test_scores_on_either_side_of_what_is_small_are_as_near_to_float64_as_under_a_mask(largest: float) -> None:
    """Below, exponentials are of scores as they are; above, relative to a running maximum."""
    q, k, v, indices = inputs(torch.float32)
    longest = [float(tensor.detach().norm(dim=-1).amax()) for tensor in (q, k)]
    near = q.detach() * (largest / (0.5 * longest[0] * longest[1]))
    exact = [tensor.detach().double().requires_grad_() for tensor in (near, k, v)]
    upstream = 1e-6 * torch.randn(2, 6, 61, 8)
    results = []
    for leaves, kernel in (
        ([near.requires_grad_(), k, v], BlockwiseKernel()),
        ([near, k, v], FusedCpuKernel()),
        (exact, EagerKernel()),
    ):
        output, lse = attended(*leaves, indices, kernel=kernel)
        results.append([output.detach(), lse, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))])
    for ours, masked, truth in zip(*results, strict=True):
        error, allowed = (float((each.double() - truth).abs().max()) for each in (ours, masked))
        assert error <= 2 * allowed + 1e-6 * float(truth.abs().max())


def test_both_ways_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    *tensors, indices = inputs(torch.float64)
    upstream = torch.randn(2, 6, 61, 8, dtype=torch.float64)
    results = []
    for small in (blockwise.SAFE_SCORE, 0.0):
        monkeypatch.setattr(blockwise, "SAFE_SCORE", small)
        output, lse = attended(*tensors, indices, kernel=BlockwiseKernel())
        results.append([output.detach(), lse, *torch.autograd.grad(output, tensors, upstream)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_the_queries_that_see_everything_are_set_apart_up_to_the_first_that_does_not() -> None:
    indices = torch.tensor([[0, EMPTY], [0, 0], [1, 0], [0, 1], [0, 1], [2, 0]], dtype=torch.int32)
    reads = block_readers(indices[None], select_len=2, keys=6, separate_leading=True)
    assert reads.unmasked_queries == 4
    listed = [(chunk.first, (chunk.queries + chunk.before).tolist()) for chunk in reads.chunks(0, 8)]
    assert listed == [(0, [4, 5]), (2, [4]), (4, [5])]


def test_a_query_that_saw_nothing_at_the_start_leaves_nobody_apart() -> None:
    indices = torch.tensor([[EMPTY], [0], [0]], dtype=torch.int32)
    assert block_readers(indices[None], select_len=2, keys=3, separate_leading=True).unmasked_queries == 0


def test_a_query_is_set_apart_where_it_sees_everything_in_all_rows() -> None:
    indices = torch.tensor([[[0], [0], [0]], [[0], [EMPTY], [0]]], dtype=torch.int32)
    assert block_readers(indices, select_len=3, keys=3, separate_leading=True).unmasked_queries == 1


def test_it_runs_where_the_chosen_keys_are_at_most_half_and_there_are_enough() -> None:
    assert blockwise.reason_blockwise_is_slower(2048, 16, 64) is None
    assert (
        blockwise.reason_blockwise_is_slower(2047, 16, 64) == "16 blocks of 64 tokens are more than half of 2047 tokens"
    )
    assert blockwise.reason_blockwise_is_slower(1023, 4, 32) == "1023 tokens are fewer than 1024"
