"""The fused kernel chooses the blocks that the reference chooses, wherever rounding lets anyone know which they are."""

from __future__ import annotations

import nsa_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_attention.ops.attend import CompletedBlocks
from nsa_attention.ops.fused import importance as fused
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.fused.importance import select_by_importance
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile, launches
from nsa_attention.ops.fused.tuning import TuningKey
from nsa_attention.ops.packed import compressed_starts
from nsa_attention.ops.selection import EMPTY, Selection, _select, overlap_weights, select_blocks

SMALL = Tile(rows=64, keys=16)
# Groups, heads per group, tokens, l, d, l', n. Odd lengths, l = d = l', T < l, T < l', more places than blocks.
CASES = [
    (1, 1, 33, 8, 4, 8, 4),
    (2, 3, 41, 6, 3, 5, 4),
    (4, 1, 19, 4, 4, 4, 3),
    (1, 16, 23, 7, 5, 9, 3),
    (2, 2, 5, 8, 4, 16, 5),
    (1, 2, 1, 4, 2, 4, 3),
    (1, 2, 50, 4, 2, 3, 33),
    (1, 2, 100, 32, 16, 64, 3),
    (1, 64, 7, 2, 1, 2, 2),
    (1, 3, 30, 9, 1, 4, 1),
]
# So long that queries have chunks of 16 selection blocks behind them: with l = 2 d, with l = d, with d that does not
# divide l', and with blocks so long that one the query does not see yet reaches back beyond the blocks that are forced.
LONG = [(1, 2, 150, 4, 2, 2, 5), (1, 4, 120, 2, 2, 2, 4), (1, 4, 110, 5, 3, 2, 4), (1, 4, 110, 12, 2, 2, 6)]


def numbers(length: int, stride: int, size: int, count: int, scale: float = 0.5) -> Selection:
    return Selection(block_len=length, block_stride=stride, select_len=size, select_count=count, scale=scale)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def inputs(batch: int, groups: int, per_group: int, tokens: int, selection: Selection, width: int = 4):
    blocks = CompletedBlocks(selection.block_len, selection.block_stride).count(tokens)
    return normal(batch, groups * per_group, tokens, width), normal(batch, groups, blocks, width)


def log_sum_exp(q: Tensor, k: Tensor, selection: Selection) -> Tensor:
    """What the compressed branch hands over: float32, or float64 for float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    last = torch.arange(k.shape[2], device=q.device) * selection.block_stride + selection.block_len - 1
    hidden = last > torch.arange(q.shape[2], device=q.device)[:, None]
    return (q @ k.transpose(2, 3) * selection.scale).masked_fill(hidden, -torch.inf).logsumexp(-1)


def chosen(q: Tensor, k: Tensor, selection: Selection, tile: Tile | None = SMALL) -> Tensor:
    """The kernel's choice, after one launch of it."""
    before = launches["ranked_blocks"]
    indices = select_by_importance(q, k, log_sum_exp(q, k, selection), selection, tile=tile)
    assert launches["ranked_blocks"] == before + (q.shape[2] > 0)
    return indices


def importance(q_HTD: Tensor, k_GSD: Tensor, selection: Selection) -> Tensor:
    """The reference computes with a scale of D^-0.5, which the inputs here are made for."""
    assert selection.scale == q_HTD.shape[-1] ** -0.5
    lengths = {"block_len": selection.block_len, "block_stride": selection.block_stride}
    return reference.importance(q_HTD, k_GSD, **lengths, select_len=selection.select_len)


@pytest.mark.parametrize("tile", [SMALL, Tile(rows=16, keys=32), None], ids=["small", "few rows", "chosen"])
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_no_tile_changes_the_choice(case: tuple[int, ...], tile: Tile | None) -> None:
    groups, per_group, tokens, *lengths = case
    selection = numbers(*lengths)
    q, k = inputs(1, groups, per_group, tokens, selection)
    assert torch.equal(chosen(q, k, selection, tile), select_blocks(q, k, selection))


@pytest.mark.parametrize("case", LONG, ids=str)
def test_chunks_that_are_seen_whole_are_ranked_as_the_tiles_rank_them(case: tuple[int, ...]) -> None:
    groups, per_group, tokens, *lengths = case
    selection = numbers(*lengths)
    q, k = inputs(1, groups, per_group, tokens, selection)
    # Some rise from block to block, so that each chunk has the best so far, and some fall, so that most have none.
    k *= torch.linspace(3, -3, k.shape[2], dtype=k.dtype)[:, None]
    assert torch.equal(chosen(q, k, selection), select_blocks(q, k, selection))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_blocks_are_chosen_as_in_the_reference_and_by_the_tiles(case: tuple[int, ...]) -> None:
    groups, per_group, tokens, *lengths = case
    selection = numbers(*lengths)
    q, k = inputs(2 if tokens < 20 else 1, groups, per_group, tokens, selection)
    ours = chosen(q, k, selection)
    assert ours.dtype == torch.int32
    assert torch.equal(ours, select_blocks(q, k, selection))
    for b in range(q.shape[0]):
        ranks = importance(q[b], k[b], selection)
        theirs = reference.select_blocks(ranks, select_len=selection.select_len, select_count=selection.select_count)
        assert torch.equal(ours[b].cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_half_types_choose_the_same_set_where_importance_differs_by_more_than_rounding(dtype: torch.dtype) -> None:
    selection = numbers(4, 2, 3, 6)
    q, k = (tensor.to(dtype) for tensor in inputs(1, 1, 3, 40, selection))
    indices = chosen(q, k, selection)[0]
    exact = importance(q[0].double(), k[0].double(), selection)
    error = (importance(q[0].float(), k[0].float(), selection).double() - exact).abs().max()
    theirs = reference.select_blocks(exact, select_len=3, select_count=6)
    # Forced blocks are in both; the least of the chosen others against the best that was left out.
    block, current = torch.arange(exact.shape[-1]), torch.arange(40)[:, None] // 3
    free = exact.masked_fill((block == 0) | (block >= current - 1), -1.0).sort(-1, descending=True).values
    clear = (free[..., 2] - free[..., 3] > 2 * error) | (free[..., 3] < 0)
    same = (indices.sort(-1).values == theirs.sort(-1).values).all(-1)
    assert bool(same[clear].all())
    assert clear.double().mean() > 0.9


def test_forced_blocks_come_first_whatever_their_importance() -> None:
    selection = numbers(4, 4, 4, 5)
    q, k = inputs(1, 1, 2, 40, selection)
    last = chosen(q, k, selection)[0, 0, -1].tolist()
    assert last[:3] == [0, 8, 9]
    assert len(set(last)) == 5


def test_equal_importance_goes_to_the_lower_index() -> None:
    selection = numbers(4, 4, 4, 5)
    for zero in (0.0, -0.0):
        q = torch.full((1, 2, 40, 4), zero)
        assert chosen(q, normal(1, 1, 10, 4, dtype=torch.float32), selection)[0, 0, -1].tolist() == [0, 8, 9, 1, 2]


def test_early_queries_leave_places_empty() -> None:
    selection = numbers(4, 4, 4, 5)
    q, k = inputs(1, 1, 1, 12, selection)
    indices = chosen(q, k, selection)[0, 0]
    assert indices[0].tolist() == [0, EMPTY, EMPTY, EMPTY, EMPTY]
    assert indices[4].tolist() == [0, 1, EMPTY, EMPTY, EMPTY]
    assert indices[11].tolist() == [0, 1, 2, EMPTY, EMPTY]


def test_no_tokens_are_no_launch() -> None:
    selection = numbers(4, 4, 4, 5)
    assert chosen(normal(1, 2, 0, 4), normal(1, 1, 0, 4), selection).shape == (1, 1, 0, 5)


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("lengths", [(12, 4), (0, 7, 30, 0, 5, 21), (3, 2)], ids=str)
def test_packed_sequences_choose_as_each_of_them_alone(lengths: tuple[int, ...], size: int) -> None:
    selection = numbers(6, 3, size, 4)
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    first_blocks = compressed_starts(starts, 6, 3).tolist()
    q, k = normal(1, 4, sum(lengths), 4), normal(1, 2, first_blocks[-1], 4)
    parts = [
        (q[:, :, starts[i] : starts[i + 1]], k[:, :, first_blocks[i] : first_blocks[i + 1]])
        for i in range(len(lengths))
    ]
    lse = torch.cat([log_sum_exp(*part, selection) for part in parts], 2)
    together = select_by_importance(q, k, lse, selection, starts=starts, tile=Tile(rows=32, keys=16))
    alone = [select_blocks(*part, selection) for part in parts if part[0].shape[2]]
    assert torch.equal(together, torch.cat(alone, 2))


def test_no_choice_depends_on_later_keys_or_queries() -> None:
    # Compressed blocks so long that one the query does not see yet reaches back beyond the blocks that are forced.
    selection = numbers(12, 3, 2, 6)
    q, k = inputs(1, 1, 3, 60, selection)
    before, cut = chosen(q, k, selection), 37
    later = slice(CompletedBlocks(12, 3).count(cut), None)
    for change in (-3.0, torch.nan):
        other_q, other_k = q.clone(), k.clone()
        other_q[:, :, cut:] *= change
        other_k[:, :, later] *= change
        after = chosen(other_q, other_k, selection)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


def test_the_choice_is_the_same_in_every_run() -> None:
    selection = numbers(6, 3, 5, 4)
    q, k = (tensor.float() for tensor in inputs(1, 2, 3, 41, selection))
    assert torch.equal(chosen(q, k, selection), chosen(q, k, selection))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_huge_logits_give_a_choice_within_range(dtype: torch.dtype) -> None:
    selection = numbers(4, 2, 4, 4, scale=1.0)
    q, k = ((tensor * 1000).to(dtype) for tensor in inputs(1, 1, 3, 50, selection))
    assert_a_choice(chosen(q, k, selection), selection)


def test_queries_that_are_not_numbers_give_a_choice_within_range_and_disturb_no_other() -> None:
    selection = numbers(4, 2, 4, 4)
    q, k = inputs(1, 1, 3, 50, selection)
    before = chosen(q, k, selection)
    q[:, 1, 30] = torch.nan
    q[:, 2, 40] = torch.inf
    after = chosen(q, k, selection)
    assert_a_choice(after, selection)
    others = torch.tensor([t not in (30, 40) for t in range(50)])
    assert torch.equal(before[:, :, others], after[:, :, others])


def assert_a_choice(indices: Tensor, selection: Selection) -> None:
    """Different visible blocks, the forced ones among them, and empty places only where there are no more blocks."""
    for t, row in enumerate(indices[0, 0].tolist()):
        current = t // selection.select_len
        blocks = [index for index in row if index != EMPTY]
        assert len(blocks) == len(set(blocks)) == min(selection.select_count, current + 1)
        assert {0, current, max(0, current - 1)} <= set(blocks) <= set(range(current + 1))


def test_layouts_that_are_not_contiguous_are_read_as_they_are() -> None:
    selection = numbers(6, 3, 5, 4)
    q, k = inputs(1, 2, 3, 41, selection)
    q_turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_spread = torch.stack((k, k), -1)[..., 0]
    assert torch.equal(chosen(q_turned, k_spread, selection), chosen(q, k, selection))


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(
    heads=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]),
    tokens=st.integers(1, 30),
    stride=st.integers(1, 5),
    longer=st.integers(0, 5),
    size=st.integers(2, 9),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_shape_chooses_as_the_tiles_do(
    heads: tuple[int, int], tokens: int, stride: int, longer: int, size: int, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    selection = numbers(stride + longer, stride, size, count)
    q, k = inputs(1, *heads, tokens, selection, width=3)
    assert torch.equal(chosen(q, k, selection), select_blocks(q, k, selection))


@pytest.mark.parametrize(("length", "stride", "size"), [(32, 16, 64), (6, 3, 5), (7, 5, 9), (4, 4, 4), (9, 1, 4)])
def test_taps_are_the_most_blocks_that_overlap_one(length: int, stride: int, size: int) -> None:
    selection = numbers(length, stride, size, 3)
    _, weights = overlap_weights(40, 10_000, selection, torch.float64, torch.device("cpu"))
    assert fused.taps_per_block(selection) == int((weights > 0).sum(1).max())


def test_a_program_has_rows_for_all_heads_and_not_too_many_queries() -> None:
    for heads in (1, 4, 64):
        tuning_key = TuningKey.of(
            "ranked_blocks", *(torch.empty(1, n, 9, 128, dtype=torch.bfloat16) for n in (heads, 1, 1)), "any"
        )
        for tile in fused._candidate_tiles(tuning_key):
            assert heads <= tile.rows <= fused.MAX_TILE_QUERIES * heads


def test_what_cannot_be_ranked_is_refused_by_name() -> None:
    selection = numbers(4, 2, 4, 3)
    q, k = inputs(2, 1, 1, 9, selection)
    lse = log_sum_exp(q, k, selection)
    with pytest.raises(CannotLaunchError, match="q_BHTD has a batch of 2"):
        select_by_importance(q, k, lse, selection, starts=torch.tensor([0, 9], dtype=torch.int32))
    with pytest.raises(CannotLaunchError, match="cast them to one"):
        select_by_importance(q, k.float(), lse, selection)


def test_the_operator_keeps_its_promises_to_torch() -> None:
    selection = numbers(4, 2, 5, 4)
    q, k = inputs(1, 2, 2, 20, selection)
    starts = torch.tensor([0, 20], dtype=torch.int32)
    for begins in (starts, None):
        arguments = (q, k, 4, 2, 5, 4, 0.5, None, log_sum_exp(q, k, selection), begins, FusedBackend.name)
        torch.library.opcheck(_select, arguments)
