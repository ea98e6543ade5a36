"""The operations say what the reference says, in values and in every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import nsa_reference as reference
import pytest
import torch
from torch import Tensor

from nsa_attention.ops import attend, blockwise, kernels
from nsa_attention.ops.attend import CompletedBlocks, compressed_attention, selected_attention, sliding_attention
from nsa_attention.ops.backends import TiledBackend
from nsa_attention.ops.cached_attention import block_probabilities, compressed_output
from nsa_attention.ops.dense import DenseBackend
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.kernels import BlockwiseKernel, EagerKernel, FusedCpuKernel, Kernel
from nsa_attention.ops.per_token import PerTokenLoop
from nsa_attention.ops.selection import (
    EMPTY,
    Selection,
    _select,
    _top_by_packed_keys,
    _top_by_sort,
    overlap_weights,
    select_blocks,
)

TOLERANCE = 1e-10
KERNELS: list[Kernel] = [EagerKernel(), FusedCpuKernel(), BlockwiseKernel()]
# Groups, heads per group, tokens, l, d, l', n, w. T < l, T < l', odd lengths, l not a multiple of d, groups of 1 to 16.
CASES = [
    (1, 1, 33, 8, 4, 8, 4, 7),
    (2, 3, 41, 6, 3, 5, 4, 9),
    (16, 1, 19, 4, 4, 4, 3, 3),
    (1, 16, 23, 7, 5, 9, 3, 1),
    (2, 2, 5, 8, 4, 16, 5, 64),
    (1, 2, 1, 4, 2, 4, 3, 2),
]


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    k_blocks: Tensor
    v_blocks: Tensor
    block_len: int
    block_stride: int
    select_len: int
    window: int
    selection: Selection

    @property
    def scale(self) -> float:
        return self.selection.scale


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    groups, per_group, tokens, block_len, stride, select_len, count, window = request.param
    blocks = CompletedBlocks(block_len, stride).count(tokens)

    def leaf(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 4, dtype=torch.float64, requires_grad=True)

    return Case(
        q=leaf(groups * per_group, tokens),
        k=leaf(groups, tokens),
        v=leaf(groups, tokens),
        k_blocks=leaf(groups, blocks),
        v_blocks=leaf(groups, blocks),
        block_len=block_len,
        block_stride=stride,
        select_len=select_len,
        window=window,
        selection=Selection(
            block_len=block_len, block_stride=stride, select_len=select_len, select_count=count, scale=0.5
        ),
    )


@pytest.fixture(params=[1 << 22, 1], ids=["one tile", "many tiles"])
def tile_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", request.param)


def per_sequence(operation, *tensors: Tensor, **numbers: int) -> tuple[Tensor, ...]:
    """The reference for each sequence of the batch."""
    results = [operation(*(tensor[b] for tensor in tensors), **numbers) for b in range(tensors[0].shape[0])]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(ours[1], theirs[1].detach(), rtol=0, atol=TOLERANCE)
    upstream = torch.randn_like(ours[0])
    our_gradients = torch.autograd.grad(ours[0], inputs, upstream)
    their_gradients = torch.autograd.grad(theirs[0], inputs, upstream)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("tile_elements")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
class TestEachBranchEqualsItsReference:
    def test_compressed(self, case: Case, kernel: Kernel) -> None:
        numbers = {"block_len": case.block_len, "block_stride": case.block_stride}
        inputs = (case.q, case.k_blocks, case.v_blocks)
        ours = compressed_attention(*inputs, **numbers, scale=case.scale, kernel=kernel)
        assert_same(ours, per_sequence(reference.compressed_attention, *inputs, **numbers), inputs)

    def test_sliding(self, case: Case, kernel: Kernel) -> None:
        inputs = (case.q, case.k, case.v)
        ours = sliding_attention(*inputs, window=case.window, scale=case.scale, kernel=kernel)
        assert_same(ours, per_sequence(reference.sliding_attention, *inputs, window=case.window), inputs)

    def test_selected_with_the_chosen_blocks(self, case: Case, kernel: Kernel) -> None:
        inputs = (case.q, case.k, case.v)
        indices = select_blocks(case.q, case.k_blocks, case.selection)
        ours = selected_attention(*inputs, indices, select_len=case.select_len, scale=case.scale, kernel=kernel)
        theirs = per_sequence(reference.selected_attention, *inputs, indices, select_len=case.select_len)
        assert_same(ours, theirs, inputs)

    def test_selected_with_empty_repeated_and_future_blocks(self, case: Case, kernel: Kernel) -> None:
        inputs = (case.q, case.k, case.v)
        blocks = -(-case.q.shape[2] // case.select_len)
        indices = torch.randint(EMPTY, blocks, (2, case.k.shape[1], case.q.shape[2], 5), dtype=torch.int32)
        indices[:, :, 0] = EMPTY  # a query that sees nothing: output 0, log-sum-exp -inf, no NaN anywhere
        ours = selected_attention(*inputs, indices, select_len=case.select_len, scale=case.scale, kernel=kernel)
        theirs = per_sequence(reference.selected_attention, *inputs, indices, select_len=case.select_len)
        assert_same(ours, theirs, inputs)


def test_the_loop_over_tokens_is_right_and_only_slow(case: Case) -> None:
    inputs = (case.q, case.k, case.v)
    indices = select_blocks(case.q, case.k_blocks, case.selection)
    indices[:, :, 0] = EMPTY
    theirs = per_sequence(reference.selected_attention, *inputs, indices, select_len=case.select_len)
    ours, _ = PerTokenLoop().attend_selected(*inputs, indices, select_len=case.select_len, scale=case.scale)
    assert_same((ours, theirs[1].detach()), theirs, inputs)


DENSE = DenseBackend(EagerKernel())


class TestAllScoresAtOnceAreRightToo:
    def test_selected(self, case: Case) -> None:
        inputs = (case.q, case.k, case.v)
        blocks = -(-case.q.shape[2] // case.select_len)
        indices = torch.randint(EMPTY, blocks, (2, case.k.shape[1], case.q.shape[2], 5), dtype=torch.int32)
        indices[:, :, 0] = EMPTY
        ours = DENSE.attend_selected(*inputs, indices, select_len=case.select_len, scale=case.scale)
        assert_same(
            ours, per_sequence(reference.selected_attention, *inputs, indices, select_len=case.select_len), inputs
        )

    def test_compressed(self, case: Case) -> None:
        numbers = {"block_len": case.block_len, "block_stride": case.block_stride}
        inputs = (case.q, case.k_blocks, case.v_blocks)
        ours = DENSE.attend_compressed(*inputs, **numbers, scale=case.scale)
        assert_same(ours, per_sequence(reference.compressed_attention, *inputs, **numbers), inputs)

    def test_sliding(self, case: Case) -> None:
        inputs = (case.q, case.k, case.v)
        ours = DENSE.attend_sliding(*inputs, window=case.window, scale=case.scale)
        assert_same(ours, per_sequence(reference.sliding_attention, *inputs, window=case.window), inputs)

    def test_packed_sequences_are_as_each_alone(self) -> None:
        q, k, v = (torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
        indices, starts = torch.zeros(1, 2, 9, 3, dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
        last = [tensor[:, :, 4:] for tensor in (q, k, v)]
        torch.testing.assert_close(
            DENSE.attend_sliding(q, k, v, window=3, scale=0.5, starts=starts)[0][:, :, 4:],
            DENSE.attend_sliding(*last, window=3, scale=0.5)[0],
        )
        torch.testing.assert_close(
            DENSE.attend_selected(q, k, v, indices, select_len=2, scale=0.5, starts=starts)[0][:, :, 4:],
            DENSE.attend_selected(*last, indices[:, :, 4:], select_len=2, scale=0.5)[0],
        )
        blocks = torch.randn(1, 2, 5, 4, dtype=torch.float64)  # 2 of the first sequence, 3 of the second
        lengths = {"block_len": 2, "block_stride": 1, "scale": 0.5}
        starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        torch.testing.assert_close(
            DENSE.attend_compressed(q[:, :, :7], blocks, blocks, **lengths, starts=starts)[0][:, :, 3:],
            DENSE.attend_compressed(q[:, :, 3:7], blocks[:, :, 2:], blocks[:, :, 2:], **lengths)[0],
        )

    def test_the_scores_are_kept_for_the_backward_pass_and_grow_with_the_square(self) -> None:
        def kept(tokens: int) -> int:
            sizes: list[int] = []
            q, k, v = (torch.randn(1, heads, tokens, 4, requires_grad=True) for heads in (4, 2, 2))

            def pack(tensor: Tensor) -> Tensor:
                sizes.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                DENSE.attend_sliding(q, k, v, window=8, scale=0.5)
            return max(sizes)

        assert (kept(32), kept(64)) == (4 * 32**2, 4 * 64**2)


@pytest.mark.usefixtures("tile_elements")
def test_the_same_blocks_are_chosen_as_in_the_reference(case: Case) -> None:
    numbers = {"block_len": case.block_len, "block_stride": case.block_stride, "select_len": case.select_len}
    for b in range(2):
        importance = reference.importance(case.q[b].detach(), case.k_blocks[b].detach(), **numbers)
        expected = reference.select_blocks(
            importance, select_len=case.select_len, select_count=case.selection.select_count
        )
        assert torch.equal(select_blocks(case.q, case.k_blocks, case.selection)[b], expected)


def test_no_choice_depends_on_later_keys() -> None:
    """A softmax over blocks that do not exist yet shifts the heads' shares against each other and thereby the ranks."""
    selection = Selection(block_len=8, block_stride=4, select_len=8, select_count=6, scale=1.0)
    q, k = torch.randn(1, 6, 200, 4), torch.randn(1, 2, 49, 4) * 2
    before = select_blocks(q, k, selection)
    for cut in (60, 101, 160):
        changed = k.clone()
        changed[:, :, CompletedBlocks(8, 4).count(cut) :] *= -3
        after = select_blocks(q, changed, selection)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


def test_equal_importance_goes_to_the_lower_index() -> None:
    selection = Selection(block_len=4, block_stride=4, select_len=4, select_count=5, scale=1.0)
    q, k = torch.zeros(1, 1, 40, 2), torch.zeros(1, 1, 10, 2)
    last_query = select_blocks(q, k, selection)[0, 0, -1]
    assert last_query.tolist() == [0, 8, 9, 1, 2]


def test_early_queries_leave_places_empty() -> None:
    selection = Selection(block_len=4, block_stride=4, select_len=4, select_count=5, scale=1.0)
    indices = select_blocks(torch.randn(1, 1, 12, 2), torch.randn(1, 1, 3, 2), selection)[0, 0]
    assert indices[0].tolist() == [0, EMPTY, EMPTY, EMPTY, EMPTY]
    assert indices[4].tolist() == [0, 1, EMPTY, EMPTY, EMPTY]
    assert indices[11].tolist() == [0, 1, 2, EMPTY, EMPTY]


def test_overlap_weights_of_32_16_64_are_1_2_2_2_1() -> None:
    selection = Selection(block_len=32, block_stride=16, select_len=64, select_count=3, scale=1.0)
    blocks, weights = overlap_weights(4, 15, selection, torch.float64, torch.device("cpu"))
    second = {int(i): float(w) for i, w in zip(blocks[1], weights[1], strict=True) if w > 0}
    assert second == {3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 1.0}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_gradcheck_of_each_branch(kernel: Kernel) -> None:
    def leaf(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, 2, dtype=torch.float64, requires_grad=True)

    q, k, v, k_blocks, v_blocks = leaf(2, 7), leaf(1, 7), leaf(1, 7), leaf(1, 3), leaf(1, 3)
    indices = torch.tensor([[[[0, -1]] * 3 + [[1, 0]] * 3 + [[-1, 2]]]], dtype=torch.int32)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, block_len=3, block_stride=2, scale=0.7, kernel=kernel)[0]

    def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliding_attention(q, k, v, window=3, scale=0.7, kernel=kernel)[0]

    def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, indices, select_len=3, scale=0.7, kernel=kernel)[0]

    assert torch.autograd.gradcheck(compressed, (q, k_blocks, v_blocks))
    assert torch.autograd.gradcheck(sliding, (q, k, v))
    assert torch.autograd.gradcheck(selected, (q, k, v))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits_stay_finite(kernel: Kernel, dtype: torch.dtype) -> None:
    q = (torch.randn(1, 4, 32, 8) * 60).to(dtype).requires_grad_()
    k = (torch.randn(1, 2, 32, 8) * 60).to(dtype).requires_grad_()
    v = torch.randn(1, 2, 32, 8).to(dtype).requires_grad_()
    output, _ = sliding_attention(q, k, v, window=5, scale=1.0, kernel=kernel)
    output.float().sum().backward()
    for tensor in (output, q.grad, k.grad, v.grad):
        assert bool(tensor.isfinite().all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in rows that do not exist
def test_blocks_with_a_score_of_minus_infinity_are_as_hidden_for_every_implementation() -> None:
    """Queries 5 and 6 see block 0 only: as if they saw no block, they get 0 and -inf, and no NaN."""
    q, k, v = torch.rand(1, 4, 20, 4) + 0.1, torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    k[:, :, 0] = -torch.inf
    lengths = {"block_len": 6, "block_stride": 2}
    expected = per_sequence(reference.compressed_attention, q, k, v, **lengths)
    assert all(bool((part[:, :, :7] == empty).all()) for part, empty in zip(expected, (0, -torch.inf), strict=True))
    selection = Selection(**lengths, select_len=3, select_count=4, scale=0.5)
    importance = reference.importance(q[0], k[0], **lengths, select_len=3)
    indices = reference.select_blocks(importance, select_len=3, select_count=4)
    tiled = [TiledBackend(kernel) for kernel in kernels.KERNELS.values()]
    for backend in (DENSE, *tiled, FusedBackend()):
        ours = backend.attend_compressed(q, k, v, **lengths, scale=0.5)
        torch.testing.assert_close(ours, expected, msg=lambda text, name=backend.name: f"{name}: {text}")
        assert torch.equal(backend.select(q, k, ours[1], selection)[0], indices), backend.name
    probabilities = block_probabilities(q.unflatten(1, (2, 2))[0], k[0], torch.arange(20)[None], selection)
    torch.testing.assert_close(compressed_output(probabilities, v[0]).flatten(0, 1), expected[0][0])


def test_packed_and_sorted_ranks_agree_on_ties_infinities_and_zeros() -> None:
    ranked = torch.randint(0, 4, (3, 50, 23)).float() / 3
    ranked[:, :, 0] = torch.inf
    ranked[:, 10:20, 7:] = -torch.inf
    score, order = _top_by_sort(ranked, 9)
    packed, packed_order = _top_by_packed_keys(ranked, 9)
    exists = score > -torch.inf
    assert torch.equal(exists, packed >= 0)
    assert torch.equal(order[exists], packed_order[exists])


class TestTheOperatorsKeepTheirPromisesToTorch:
    """Schema, autograd, shapes without data and tracing, also with lengths that vary: what torch.compile relies on."""

    @pytest.mark.parametrize(("pattern", "lengths"), [("compressed", [4, 2]), ("sliding", [5]), ("selected", [3])])
    @pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
    def test_attention(self, pattern: str, lengths: list[int], kernel: Kernel) -> None:
        q = torch.randn(2, 3, 11, 4, dtype=torch.float64, requires_grad=True)
        keys = CompletedBlocks(4, 2).count(11) if pattern == "compressed" else 11
        k, v = (torch.randn(2, keys, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        indices = torch.randint(EMPTY, 4, (2, 11, 3), dtype=torch.int32)
        form = (pattern, lengths, kernel.name, 0.5)
        torch.library.opcheck(attend._attend, (q, k, v, indices, *form))
        output, lse = attend._attend(q, k, v, indices, *form)
        saved = [tensor.detach() for tensor in (torch.randn_like(output), q, k, v, indices, output, lse)]
        torch.library.opcheck(attend._attend_backward, (*saved, *form))

    def test_attention_block_by_block(self) -> None:
        q = torch.randn(2, 3, 11, 4, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        indices = torch.randint(EMPTY, 4, (2, 11, 3), dtype=torch.int32)
        torch.library.opcheck(blockwise._blockwise, (q, k, v, indices, 3, 0.5))
        output, lse = blockwise._blockwise(q, k, v, indices, 3, 0.5)
        saved = [tensor.detach() for tensor in (torch.randn_like(output), q, k, v, indices, output, lse)]
        torch.library.opcheck(blockwise._blockwise_backward, (*saved, 3, 0.5))

    def test_choice(self) -> None:
        q, k = torch.randn(1, 4, 20, 4), torch.randn(1, 2, 9, 4)
        torch.library.opcheck(_select, (q, k, 4, 2, 5, 4, 0.5, None, None, None, "tiles"))
