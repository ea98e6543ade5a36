"""The fused selected branch says what the reference says: values, log-sum-exp and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import nsa_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_attention.ops.attend import selected_attention
from nsa_attention.ops.fused import descriptors, tuning
from nsa_attention.ops.fused import selected as fused
from nsa_attention.ops.fused.descriptors import make_descriptor
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile, launches
from nsa_attention.ops.fused.selected import fused_selected_attention
from nsa_attention.ops.fused.tiles import candidate_tiles
from nsa_attention.ops.fused.tuning import TuningKey
from nsa_attention.ops.kernels import EagerKernel
from nsa_attention.ops.selection import EMPTY

TOLERANCE = 1e-10
LISTS = {"selected_unions", "selected_keys", "selected_segments"}
ALL = LISTS | {"selected_forward", "selected_backward_queries", "selected_backward_keys", "selected_backward_sum"}
# A tile of several queries whatever the group, keys in pieces of 16.
SMALL = Tile(rows=64, keys=16)
# Groups, heads per group, tokens, l', n, D, E. Of the last, tiles of queries lie behind whole blocks of two pieces.
CASES = [
    (1, 1, 33, 8, 4, 4, 4),
    (2, 3, 41, 5, 4, 6, 5),
    (4, 1, 19, 4, 3, 4, 4),
    (1, 16, 23, 9, 3, 3, 17),
    (2, 2, 5, 16, 5, 4, 4),
    (1, 2, 1, 4, 3, 1, 1),
    (1, 2, 70, 40, 2, 8, 4),
    (1, 64, 3, 2, 2, 4, 4),
    (1, 2, 100, 32, 3, 4, 4),
]
Inputs = Sequence[Tensor]  # queries, keys and values


def leaves(batch: int, groups: int, per_group: int, tokens: int, widths: tuple[int, int]) -> Inputs:
    def leaf(heads: int, width: int) -> Tensor:
        return torch.randn(batch, heads, tokens, width, dtype=torch.float64, requires_grad=True)

    return leaf(groups * per_group, widths[0]), leaf(groups, widths[0]), leaf(groups, widths[1])


def any_indices(shape: tuple[int, ...], blocks: int) -> Tensor:
    """Empty places, repeats and later blocks anywhere, numbers of no block, and a query that sees nothing."""
    indices = torch.randint(EMPTY, blocks + 1, shape, dtype=torch.int32)
    indices[..., -1][torch.rand(shape[:-1]) < 0.2] = 2**31 - 1
    indices[:, :, shape[2] // 2] = EMPTY
    return indices


def specified(inputs: Inputs, indices: Tensor, select_len: int) -> tuple[Tensor, Tensor]:
    """The reference for each sequence of the batch; it knows one number for an empty place."""
    blocks = -(-indices.shape[2] // select_len)
    known = indices.masked_fill((indices < 0) | (indices >= blocks), EMPTY)
    each = [
        reference.selected_attention(*(tensor[b] for tensor in inputs), known[b], select_len=select_len)
        for b in range(indices.shape[0])
    ]
    return torch.stack([o for o, _ in each]), torch.stack([lse for _, lse in each])


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], inputs: Inputs) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(ours[1], theirs[1].detach(), rtol=0, atol=TOLERANCE)
    upstream = torch.randn_like(ours[0])
    for our, their in zip(gradients(ours[0], inputs, upstream), gradients(theirs[0], inputs, upstream), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


def gradients(output: Tensor, inputs: Inputs, upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_equal_the_reference(case: tuple[int, ...]) -> None:
    groups, per_group, tokens, select_len, places, width, value_width = case
    inputs = leaves(2 if tokens < 40 else 1, groups, per_group, tokens, (width, value_width))
    indices = any_indices((inputs[0].shape[0], groups, tokens, places), -(-tokens // select_len))
    launches.clear()
    ours = fused_selected_attention(*inputs, indices, select_len=select_len, scale=width**-0.5, tile=SMALL)
    assert_same(ours, specified(inputs, indices, select_len), inputs)
    assert set(launches) >= ALL - {"selected_backward_sum"}


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_neither_the_tile_nor_the_length_of_a_segment_changes_the_result(rows: int) -> None:
    inputs = leaves(1, 1, 3, 37, (4, 3))
    indices = any_indices((1, 1, 37, 3), 4)
    indices[..., 0] = 0
    tile = Tile(rows=rows, keys=rows)
    launches.clear()
    ours = fused_selected_attention(*inputs, indices, select_len=10, scale=0.5, tile=tile, segment=rows // 4)
    assert_same(ours, specified(inputs, indices, 10), inputs)
    assert dict(launches) == dict.fromkeys(ALL, 1) | {"selected_unions": 2}


def test_no_token_no_place_and_nothing_chosen_give_0_and_minus_infinity() -> None:
    run = partial(fused_selected_attention, select_len=4, scale=1.0)
    inputs = leaves(2, 1, 2, 9, (4, 4))
    for indices in (torch.zeros(2, 1, 9, 0, dtype=torch.int32), torch.full((2, 1, 9, 3), EMPTY, dtype=torch.int32)):
        output, lse = run(*inputs, indices)
        assert bool((output == 0).all())
        assert bool((lse == -torch.inf).all())
        assert all(bool((g == 0).all()) for g in gradients(output, inputs, torch.ones_like(output)))
    none = leaves(2, 1, 2, 0, (4, 4))
    output, lse = run(*none, torch.zeros(2, 1, 0, 3, dtype=torch.int32))
    assert (output.shape, lse.shape) == ((2, 2, 0, 4), (2, 2, 0))
    assert [g.shape for g in gradients(output, none, output.detach())] == [tensor.shape for tensor in none]


def test_packed_sequences_equal_each_sequence_by_itself() -> None:
    lengths = [7, 0, 1, 13]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    inputs = leaves(1, 2, 2, sum(lengths), (4, 3))
    indices = any_indices((1, 2, sum(lengths), 3), 3)
    # The short last block of the first sequence is shared out, and the block behind it is not.
    indices[..., 0] = torch.cat([torch.arange(length, dtype=torch.int32) // 4 for length in lengths])
    together = fused_selected_attention(*inputs, indices, select_len=4, scale=0.5, starts=starts, tile=SMALL, segment=2)
    alone = [
        specified(tuple(tensor[:, :, first:last] for tensor in inputs), indices[:, :, first:last], 4)
        for first, last in zip(starts.tolist(), starts[1:].tolist(), strict=False)
        if last > first
    ]
    assert_same(together, (torch.cat([o for o, _ in alone], 2), torch.cat([lse for _, lse in alone], 2)), inputs)


def test_views_of_any_stride_are_taken_as_they_are() -> None:
    inputs = leaves(1, 2, 2, 11, (4, 3))
    indices = any_indices((1, 2, 11, 2), 3)
    run = partial(fused_selected_attention, select_len=4, scale=0.5, tile=SMALL)
    expected = run(*inputs, indices)
    by_token = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs]
    by_width = [tensor.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for tensor in inputs]
    upstream = torch.randn(1, 11, 4, 3, dtype=torch.float64).transpose(1, 2)
    for views in (by_token, by_width):
        assert not any(tensor.is_contiguous() for tensor in views)
        output, lse = run(*views, indices)
        assert torch.equal(output, expected[0])
        assert torch.equal(lse, expected[1])
        ours, theirs = gradients(output, views, upstream), gradients(expected[0], inputs, upstream)
        assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def test_rows_more_than_31_bits_apart_are_found(tmp_path: Path) -> None:
    """Tokens 2^30 elements apart, in a file of holes."""
    apart, tokens, width = 1 << 30, 4, 3
    dense = leaves(1, 1, 1, tokens, (width, width))
    size, kind = apart * (tokens - 1) + 3 * width, torch.float16
    far = torch.from_file(str(tmp_path / "holes"), shared=True, size=size, dtype=kind)
    views = [far.as_strided((1, 1, tokens, width), (0, 0, apart, 1), i * width) for i in range(3)]
    for view, tensor in zip(views, dense, strict=True):
        view.copy_(tensor.detach())
    indices = torch.tensor([0, 0, 1, 1], dtype=torch.int32).view(1, 1, tokens, 1)
    run = partial(fused_selected_attention, indices_BGTn=indices, select_len=2, scale=1.0, tile=SMALL)
    near = [view.contiguous() for view in views]
    found = [[view.detach().requires_grad_() for view in tensors] for tensors in (views, near)]
    (ours, _), (theirs, _) = run(*found[0]), run(*found[1])
    assert torch.equal(ours, theirs)
    upstream = torch.ones_like(ours)
    for our, their in zip(gradients(ours, found[0], upstream), gradients(theirs, found[1], upstream), strict=True):
        assert torch.equal(our, their)


def test_an_upstream_gradient_without_strides_is_taken() -> None:
    inputs = leaves(1, 1, 2, 6, (4, 3))
    indices = any_indices((1, 1, 6, 2), 2)
    ours = fused_selected_attention(*inputs, indices, select_len=4, scale=0.5)[0].sum()
    theirs = specified(inputs, indices, 4)[0].sum()
    for our, their in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_error_is_at_most_twice_that_of_plain_torch(dtype: torch.dtype) -> None:
    exact = leaves(1, 1, 4, 40, (16, 16))
    indices = any_indices((1, 1, 40, 4), 5)
    indices[..., 0] = 0
    upstream = torch.randn(1, 4, 40, 16, dtype=torch.float64)

    def results(run: Callable[..., tuple[Tensor, Tensor]], kind: torch.dtype) -> list[Tensor]:
        inputs = tuple(tensor.detach().to(dtype).to(kind).requires_grad_() for tensor in exact)
        output, lse = run(*inputs, indices, select_len=8, scale=0.25)
        return [output, lse, *gradients(output, inputs, upstream.to(dtype).to(kind))]

    eager = partial(selected_attention, kernel=EagerKernel())
    truth = results(eager, torch.float64)
    for name, ours, plain, true in zip(
        ("o", "lse", "dq", "dk", "dv"),
        results(fused_selected_attention, dtype),
        results(eager, dtype),
        truth,
        strict=True,
    ):
        assert ours.dtype == plain.dtype
        error, allowed = (float((tensor.double() - true).detach().abs().max()) for tensor in (ours, plain))
        assert error <= 2 * allowed, name


def test_gradcheck_in_float64() -> None:
    inputs = leaves(1, 1, 2, 7, (2, 3))
    indices = torch.tensor([[[[0, -1]] * 3 + [[1, 0]] * 3 + [[-1, 2]]]], dtype=torch.int32)

    def output(*tensors: Tensor) -> Tensor:
        return fused_selected_attention(*tensors, indices, select_len=3, scale=0.7, tile=SMALL, segment=4)[0]

    assert torch.autograd.gradcheck(output, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    q, k = ((torch.randn(1, heads, 24, 8) * 60).to(dtype).requires_grad_() for heads in (2, 1))
    v = torch.randn(1, 1, 24, 8).to(dtype).requires_grad_()
    indices = any_indices((1, 1, 24, 3), 4)
    output, _ = fused_selected_attention(q, k, v, indices, select_len=6, scale=1.0)
    for tensor in (output, *gradients(output, (q, k, v), torch.ones_like(output))):
        assert bool(tensor.isfinite().all())


def test_a_scale_below_zero_turns_the_order_of_huge_logits_around() -> None:
    """The highest exponent is that of the lowest product, also in blocks that nothing masks."""
    q, k = (60 * torch.randn(1, heads, 80, 8) for heads in (2, 1))
    v, indices = torch.randn(1, 1, 80, 8), any_indices((1, 1, 80, 3), 5)
    output, lse = fused_selected_attention(q, k, v, indices, select_len=16, scale=-1.0, tile=SMALL)
    wanted, wanted_lse = fused_selected_attention(-q, k, v, indices, select_len=16, scale=1.0, tile=SMALL)
    torch.testing.assert_close((output, lse), (wanted, wanted_lse))
    assert bool(output.isfinite().all())


def test_the_same_input_gives_the_same_bits() -> None:
    inputs = tuple(tensor.detach().float().requires_grad_() for tensor in leaves(1, 1, 2, 30, (8, 8)))
    indices = any_indices((1, 1, 30, 4), 6)
    upstream = torch.randn(1, 2, 30, 8)

    def bits() -> list[Tensor]:
        output, lse = fused_selected_attention(*inputs, indices, select_len=5, scale=0.3, tile=SMALL, segment=16)
        return [output, lse, *gradients(output, inputs, upstream)]

    assert all(torch.equal(first, second) for first, second in zip(bits(), bits(), strict=True))


def test_no_output_depends_on_later_tokens() -> None:
    inputs = leaves(1, 1, 2, 21, (4, 4))
    indices = any_indices((1, 1, 21, 3), 5)
    run = partial(fused_selected_attention, indices_BGTn=indices, select_len=5, scale=0.5, tile=SMALL)
    before, _ = run(*inputs)
    changed = [torch.cat((tensor[:, :, :13], -3 * tensor[:, :, 13:]), 2) for tensor in inputs]
    after, _ = run(*changed)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.equal(before[:, :, 13:], after[:, :, 13:])


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_small_shape_equals_the_reference(data: st.DataObject) -> None:
    groups, per_group = data.draw(st.sampled_from([(1, 1), (1, 5), (2, 2), (3, 1)]))
    tokens, select_len = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 18))
    widths = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    shape = (1, groups, tokens, data.draw(st.integers(1, 3)))
    number = st.integers(-2, -(-tokens // select_len))
    size = groups * tokens * shape[3]
    indices = torch.tensor(data.draw(st.lists(number, min_size=size, max_size=size)), dtype=torch.int32).view(shape)
    inputs = leaves(1, groups, per_group, tokens, widths)
    ours = fused_selected_attention(
        *inputs, indices, select_len=select_len, scale=widths[0] ** -0.5, tile=SMALL, segment=5
    )
    assert_same(ours, specified(inputs, indices, select_len), inputs)


class TestTheOperatorsKeepTheirPromisesToTorch:
    """Schema, autograd, shapes without data and tracing: what torch.compile relies on."""

    @pytest.mark.parametrize("packed", [False, True])
    def test_forward_and_backward(self, packed: bool) -> None:
        q, k, v = leaves(1, 1, 2, 6, (4, 3))
        indices = any_indices((1, 1, 6, 2), 2)
        starts = torch.tensor([0, 2, 6], dtype=torch.int32) if packed else None
        tile = [32, 16, 4, 2]
        lists = (indices, starts)
        torch.library.opcheck(fused._selected_attention_op, (q, k, v, *lists, 4, 0.5, tile, 4))
        output, lse = fused._selected_attention_op(q, k, v, *lists, 4, 0.5, tile, 4)
        saved = [tensor.detach() for tensor in (torch.randn_like(output), q, k, v)]
        results = (output.detach(), lse.detach())
        torch.library.opcheck(fused._selected_attention_backward_op, (*saved, *lists, *results, 4, 0.5, tile, 4))


@pytest.mark.parametrize("heads", [1, 3, 16, 64])
@pytest.mark.parametrize("capability", [0, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_tile_to_choose_from_holds_all_heads_of_a_group_and_at_most_a_bit_of_queries(
    heads: int, dtype: torch.dtype, capability: int
) -> None:
    tensors = [torch.empty(1, number, 1, 4, dtype=dtype) for number in (heads, 1, 1)]
    sizes = fused.kernel_constants(*tensors, 1.0) | {"SELECT_LEN": 64}
    for kernel in ("selected_forward", "selected_backward_queries, gated", "selected_backward_keys"):
        tiles = candidate_tiles(replace(TuningKey.of(kernel, *tensors, "selected l'=64"), capability=capability))
        assert 1 <= len(tiles) <= 8
        for tile in tiles:
            queries = None if "keys" in kernel else fused._queries_per_tile(tile, sizes)
            assert queries is None or 1 <= queries <= 32
            tiled = fused._tile_constants(tile, sizes, queries)
            assert tiled["ROWS"] % sizes["HEADS_PADDED"] == 0
            assert 16 <= tiled["ROWS"] <= 128
            assert 16 <= tiled["KEYS"] <= 64


def test_each_pass_may_hold_another_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel walks the unions of its own tiles."""
    rows = {"selected_forward": 16, "selected_backward_queries": 64, "selected_backward_keys": 32}
    monkeypatch.setattr(TuningKey, "tiles", lambda tuning_key, *_: [Tile(rows=rows[tuning_key.kernel], keys=16)])
    inputs = leaves(1, 1, 3, 37, (4, 3))
    indices = any_indices((1, 1, 37, 3), 4)
    launches.clear()
    tuning.clear()
    ours = fused_selected_attention(*inputs, indices, select_len=10, scale=0.5)
    assert_same(ours, specified(inputs, indices, 10), inputs)
    tuning.clear()
    assert launches["selected_unions"] == 2


@pytest.mark.parametrize(("width", "described"), [(8, 4), (3, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_by_descriptor_are_the_same_bits(
    width: int, described: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of two kernels; none with odd rows."""
    inputs = leaves(1, 2, 2, 70, (width, width))
    indices = any_indices((1, 2, 70, 3), 5)
    starts = torch.tensor([0, 33, 70], dtype=torch.int32) if packed else None
    made = []

    def once() -> list[Tensor]:
        output, lse = fused_selected_attention(
            *inputs, indices, select_len=16, scale=0.5, starts=starts, tile=SMALL, segment=8
        )
        return [output, lse, *torch.autograd.grad(output.sum(), inputs)]

    def noted(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
        made.append(block)
        return make_descriptor(tensor, block)

    by_pointers = once()
    monkeypatch.setattr(descriptors, "supports_descriptors", lambda _tensor: True)
    monkeypatch.setattr(descriptors, "make_descriptor", noted)
    for first, second in zip(by_pointers, once(), strict=True):
        assert torch.equal(first, second)
    assert len(made) == described


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": (1, 2, 5, 4)}, "do not belong together"),
        ({"k": (1, 3, 6, 4), "v": (1, 3, 6, 3), "indices": (1, 3, 6, 2)}, "4 query heads for 3 groups"),
        ({"indices": (1, 1, 6, 2)}, "indices are"),
        ({"q": (1, 4, 6, 300), "k": (1, 2, 6, 300)}, "the widest is 256"),
        ({"q": (1, 130, 6, 4)}, "130 query heads for 2 groups"),
    ],
)
def test_what_the_kernels_cannot_take_is_named(change: dict[str, tuple[int, ...]], text: str) -> None:
    shapes = {"q": (1, 4, 6, 4), "k": (1, 2, 6, 4), "v": (1, 2, 6, 3), "indices": (1, 2, 6, 2)} | change
    q, k, v, indices = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(CannotLaunchError, match=text):
        fused_selected_attention(q, k, v, indices.int(), select_len=4, scale=1.0)


def test_sequences_in_a_batch_and_bfloat16_in_the_interpreter_are_refused() -> None:
    inputs = leaves(2, 1, 1, 4, (4, 4))
    indices = torch.zeros(2, 1, 4, 1, dtype=torch.int32)
    with pytest.raises(CannotLaunchError, match="put all sequences into one row"):
        fused_selected_attention(
            *inputs, indices, select_len=4, scale=1.0, starts=torch.tensor([0, 4], dtype=torch.int32)
        )
    if not torch.cuda.is_available():
        halves = [tensor.detach().bfloat16() for tensor in inputs]
        with pytest.raises(CannotLaunchError, match="bfloat16"):
            fused_selected_attention(*halves, indices, select_len=4, scale=1.0)
