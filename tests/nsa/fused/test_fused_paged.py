"""The fused kernels read pages as plain torch does: the same blocks chosen, and no error that plain torch has not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from nsa_attention.config import ALL_BRANCHES, Branch
from nsa_attention.ops.cached_attention import CachedAttentionConfig, CachedRows, Kind, outputs_of_branches
from nsa_attention.ops.fused import cached as fused
from nsa_attention.ops.fused.cached import attend_and_select, attend_pages
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile, launches
from nsa_attention.ops.mixing import gated_sum
from nsa_attention.ops.selection import EMPTY, Selection, best_blocks

SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(ALL_BRANCHES, size)]
SMALL = Tile(rows=16, keys=16)
# Lengths of the sequences, l, d, l', n, w, P, heads a group. Shorter than every block, odd ones, one page for all.
CASES = [
    ((1, 5, 40), 6, 3, 5, 4, 7, 5, 2),
    ((33, 2), 4, 4, 4, 3, 16, 8, 1),
    ((70,), 8, 2, 16, 5, 20, 48, 3),
    ((9, 64, 31), 7, 5, 9, 3, 1, 18, 5),
    ((20,), 3, 1, 2, 20, 64, 32, 16),
]


def numbers(case: tuple, branches: tuple[Branch, ...] = ALL_BRANCHES) -> CachedAttentionConfig:
    _, length, stride, size, count, window, *_ = case
    selection = Selection(block_len=length, block_stride=stride, select_len=size, select_count=count, scale=0.4)
    return CachedAttentionConfig(selection=selection, window=window, branches=branches)


def pages(
    case: tuple, dtype: torch.dtype = torch.float64, groups: int = 2, width: int = 4, value_width: int = 3
) -> tuple[Tensor, Tensor, CachedRows]:
    """Queries, gates, and pages in disorder; what no sequence has is no number."""
    lengths, length, stride, *_, page_len, per_group = case
    longest = max(lengths)
    columns = -(-longest // page_len)
    order = torch.randperm(len(lengths) * 3 * columns).view(len(lengths), 3, columns)
    keys = torch.full((order.numel() + 1, groups, page_len, width), torch.nan, dtype=dtype)
    values = torch.full((order.numel() + 1, groups, page_len, value_width), torch.nan, dtype=dtype)
    for sequence, tokens in enumerate(lengths):
        for kind, count in enumerate((max(0, (tokens - length) // stride + 1), tokens, tokens)):
            for row in range(count):
                page = order[sequence, kind, row // page_len]
                keys[page, :, row % page_len] = torch.randn(groups, width).to(dtype)
                values[page, :, row % page_len] = torch.randn(groups, value_width).to(dtype)
    heads = groups * per_group
    memory = dict.fromkeys(Kind, (keys, values))
    rows = CachedRows(memory=memory, tables=order.int(), lengths=torch.tensor(lengths).int(), longest=longest)
    q = 2 * torch.randn(1, heads, len(lengths), width, dtype=dtype)
    gates = torch.rand(3, len(lengths), 1, heads, dtype=dtype).permute(0, 2, 3, 1)
    return q, gates, rows


def by_torch(q: Tensor, gates: Tensor, rows: CachedRows, decided: CachedAttentionConfig) -> Tensor:
    return gated_sum(outputs_of_branches(q, rows, decided), gates)


def as_dtype(rows: CachedRows, dtype: torch.dtype) -> CachedRows:
    return replace(rows, memory=dict.fromkeys(Kind, tuple(tensor.to(dtype) for tensor in rows.pool)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_say_what_torch_says(case: tuple) -> None:
    q, gates, rows = pages(case)
    before = launches["cached_parts"], launches["cached_output"]
    ours = attend_pages(q, gates, rows, numbers(case), tile=SMALL)
    assert (launches["cached_parts"], launches["cached_output"]) == (before[0] + 1, before[1] + 1)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, numbers(case)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
def test_a_layer_may_have_any_branches(branches: tuple[Branch, ...]) -> None:
    q, gates, rows = pages(CASES[0])
    gates, decided = gates[: len(branches)], numbers(CASES[0], branches)
    ours = attend_pages(q, gates, rows, decided)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, decided), rtol=0, atol=1e-12)


@pytest.mark.parametrize("least_rows", [1, 16, 64])
def test_into_however_many_parts_the_keys_are_cut_they_are_all_read_once(
    monkeypatch: pytest.MonkeyPatch, least_rows: int
) -> None:
    case = ((90, 1, 17), 4, 2, 8, 4, 50, 16, 2)
    q, gates, rows = pages(case)
    monkeypatch.setattr(fused, "MIN_PART_ROWS", least_rows)
    ours = attend_pages(q, gates, rows, numbers(case), tile=SMALL)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, numbers(case)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], ((400, 130), 4, 2, 2, 6, 8, 16, 2)], ids=str)
def test_the_blocks_are_those_that_training_chooses(case: tuple) -> None:
    """Also of more blocks than a chunk of the kernel has."""
    q, gates, rows = pages(case)
    decided, groups = numbers(case), rows.groups
    _, chosen_RGn = attend_and_select(q, gates, rows, decided)
    for sequence, tokens in enumerate(case[0]):
        blocks = decided.pattern.count(tokens)
        page_R, inside_R = rows.tables[sequence, 0].long(), rows.pool[0].shape[2]
        keys_GSD = rows.pool[0][page_R].transpose(0, 1).flatten(1, 2)[:, :blocks]
        assert inside_R * len(page_R) >= blocks
        q_GhCD = q[0, :, sequence].unflatten(0, (groups, -1)).unsqueeze(2)
        best = best_blocks(q_GhCD, keys_GSD, tokens - 1, decided.selection)[:, 0]
        assert torch.equal(chosen_RGn[sequence, :, : best.shape[1]], best)
        assert (chosen_RGn[sequence, :, best.shape[1] :] == EMPTY).all()


def test_equally_important_blocks_go_to_the_lower_index() -> None:
    """Queries of zero like every key alike, and of the forced blocks too the lower one comes first."""
    case = ((200,), 4, 4, 4, 6, 8, 16, 2)
    q, gates, rows = pages(case, torch.float32)
    _, chosen = attend_and_select(torch.zeros_like(q), gates, rows, numbers(case))
    assert chosen.flatten(0, 1).tolist() == [[0, 48, 49, 1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_error_is_at_most_twice_that_of_torch(dtype: torch.dtype) -> None:
    """Both against float64 on the same numbers. Every block has a place, so that rounding decides no choice."""
    case = ((150, 37), 8, 4, 16, 12, 40, 32, 4)
    q, gates, rows = pages(case, dtype, width=16, value_width=16)
    exact = by_torch(q.double(), gates.double(), as_dtype(rows, torch.float64), numbers(case))
    theirs = (by_torch(q, gates, rows, numbers(case)) - exact).abs().max()
    ours = attend_pages(q, gates, rows, numbers(case))
    assert ours.dtype is dtype
    assert (ours - exact).abs().max() <= 2 * theirs


def test_huge_scores_stay_finite() -> None:
    q, gates, rows = pages(CASES[0], torch.float32)
    assert attend_pages(q * 1e15, gates, rows, numbers(CASES[0])).isfinite().all()


def test_what_the_kernels_cannot_take_is_said() -> None:
    q, gates, rows = pages(CASES[0], torch.float32)
    with pytest.raises(CannotLaunchError, match="cast them to one"):
        attend_pages(q, gates, as_dtype(rows, torch.float16), numbers(CASES[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu_an_error_is_at_most_twice_that_of_torch(dtype: torch.dtype) -> None:
    case = ((3000, 1, 700, 64), 32, 16, 64, 48, 512, 64, 16)
    q, gates, rows = pages(case, dtype, width=128, value_width=128)
    q, gates = q.cuda(), gates.cuda()
    memory = dict.fromkeys(Kind, tuple(tensor.cuda() for tensor in rows.pool))
    rows = replace(rows, memory=memory, tables=rows.tables.cuda(), lengths=rows.lengths.cuda())
    exact = by_torch(q.double(), gates.double(), as_dtype(rows, torch.float64), numbers(case))
    theirs = (by_torch(q, gates, rows, numbers(case)) - exact).abs().max()
    assert (attend_pages(q, gates, rows, numbers(case)) - exact).abs().max() <= 2 * theirs
