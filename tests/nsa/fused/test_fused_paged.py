"""The fused kernels read pages as plain torch does: the same blocks chosen, and no error that plain torch has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from math import gcd

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nsa_reference import attend_rows, importance, select_blocks
from torch import Tensor
from triton.runtime import interpreter

from nsa_attention.config import ALL_BRANCHES, Branch
from nsa_attention.ops.cached_attention import CachedAttentionConfig, CachedRows, Kind, outputs_of_branches
from nsa_attention.ops.fused import cached as fused
from nsa_attention.ops.fused.cached import attend_and_select, attend_pages
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile, launch, launches
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
    case: tuple,
    dtype: torch.dtype = torch.float64,
    groups: int = 2,
    width: int = 4,
    value_width: int = 3,
    fresh: int = 1,
) -> tuple[Tensor, Tensor, CachedRows]:
    """Queries, gates, and pages in disorder; what no sequence has is no number. `fresh`: new tokens of a sequence."""
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
    q = 2 * torch.randn(1, heads, len(lengths) * fresh, width, dtype=dtype)
    gates = torch.rand(3, len(lengths) * fresh, 1, heads, dtype=dtype).permute(0, 2, 3, 1)
    return q, gates, rows


def by_torch(q: Tensor, gates: Tensor, rows: CachedRows, decided: CachedAttentionConfig) -> Tensor:
    return gated_sum(outputs_of_branches(q, rows, decided), gates)


def by_reference(q: Tensor, gates: Tensor, rows: CachedRows, decided: CachedAttentionConfig) -> tuple[Tensor, Tensor]:
    """The output [1, R, H, E] and the selected blocks [R, G, n] of all branches, by the loops of the reference."""
    rows = rows.per_token(q.shape[2] // len(rows.lengths))
    selection, outputs, chosen = decided.selection, [], []
    lengths = {name: getattr(selection, name) for name in ("block_len", "block_stride", "select_len")}
    q = q[0] * selection.scale * q.shape[-1] ** 0.5  # the reference has the usual scale
    for token, count in enumerate(rows.lengths.tolist()):
        (blocks, block_values), *others = (
            [tensor[rows.tables[token, kind].long()].transpose(0, 1).flatten(1, 2) for tensor in rows.pool]
            for kind in Kind
        )
        complete = decided.pattern.count(count)
        q_H1D = q[:, [token]]
        scores = importance(q_H1D.expand(-1, count, -1), blocks[:, :complete], **lengths)
        best_GTn = select_blocks(scores, select_len=selection.select_len, select_count=selection.select_count)
        chosen.append(best_GTn[:, -1])
        seen = [
            [list(range(complete))] * rows.groups,
            [[key for key in range(count) if key // selection.select_len in best] for best in chosen[-1].tolist()],
            [list(range(max(0, count - decided.window), count))] * rows.groups,
        ]
        branches = [
            attend_rows(q_H1D, k, v, [[keys] for keys in visible])[0][:, 0]
            for (k, v), visible in zip([(blocks, block_values), *others], seen, strict=True)
        ]
        outputs.append(sum(gate[:, None] * one for gate, one in zip(gates[:, 0, :, token], branches, strict=True)))
    return torch.stack(outputs)[None], torch.stack(chosen)


@contextmanager
def shared_by(programs: int) -> Iterator[None]:
    """In the block, so many programs compute an output of a token and a group, if the layer selects blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_programs_per_output", lambda _, rows: programs if rows else 1)
        yield


@contextmanager
def programs_in_order(stride: int) -> Iterator[None]:
    """In the block, the programs of a launch run in the order of the multiples of `stride` modulo their number."""
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx

    def launch_in_order(kernel: object, programs: int, *arguments: object, **options: object) -> None:
        assert gcd(stride, programs) == 1
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: place(x * stride % programs, y, z))
        launch(kernel, programs, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "launch", launch_in_order)
        yield


def as_dtype(rows: CachedRows, dtype: torch.dtype) -> CachedRows:
    return replace(rows, memory=dict.fromkeys(Kind, tuple(tensor.to(dtype) for tensor in rows.pool)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_say_what_torch_says(case: tuple) -> None:
    q, gates, rows = pages(case)
    before = launches["cached_parts"], launches["cached_output"]
    ours = attend_pages(q, gates, rows, numbers(case), tile=SMALL)
    assert (launches["cached_parts"], launches["cached_output"]) == (before[0] + 1, before[1] + 1)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, numbers(case)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
def test_a_layer_may_have_any_branches(branches: tuple[Branch, ...], programs: int) -> None:
    q, gates, rows = pages(CASES[0])
    gates, decided = gates[: len(branches)], numbers(CASES[0], branches)
    with shared_by(programs):
        ours = attend_pages(q, gates, rows, decided)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, decided), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_however_many_programs_share_an_output_it_is_that_of_the_reference(case: tuple) -> None:
    """Also of more programs than there are blocks to share, and of one that attends to no block."""
    q, gates, rows = pages(case)
    expected, chosen = by_reference(q, gates, rows, numbers(case))
    for programs in (1, 2, 4, 12):
        with shared_by(programs):
            ours, indices = attend_and_select(q, gates, rows, numbers(case), tile=SMALL)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        assert torch.equal(indices, chosen)


@settings(max_examples=10)
@given(st.data())
def test_any_lengths_and_branches_give_what_torch_gives(data: st.DataObject) -> None:
    number = st.integers
    fresh = data.draw(number(1, 2), "new tokens of a sequence")
    lengths = tuple(data.draw(st.lists(number(fresh, 40), min_size=1, max_size=2), "lengths"))
    select_len, length = data.draw(number(1, 20), "l'"), data.draw(number(1, 12), "l")
    stride = data.draw(number(1, length), "d")
    places, window = data.draw(number(3, 9), "n"), data.draw(number(1, 40), "w")
    page_len = select_len * data.draw(number(1, 3), "blocks of a page")
    case = (lengths, length, stride, select_len, places, window, page_len, data.draw(number(1, 16), "heads of a group"))
    branches = data.draw(st.sampled_from(SUBSETS), "branches")
    q, gates, rows = pages(case, fresh=fresh)
    gates, decided = gates[: len(branches)], numbers(case, branches)
    with shared_by(data.draw(number(1, 6), "programs")):
        ours = attend_pages(q, gates, rows, decided)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, decided), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_bits_are_the_same_in_whatever_order_programs_finish(dtype: torch.dtype) -> None:
    """And whatever the memory of the counters and partial results was before."""
    case = ((90, 61), 4, 2, 8, 6, 20, 16, 2)
    q, gates, rows = pages(case, dtype, width=16, value_width=16)
    outputs = []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN and with the largest integers
    try:
        for stride in (1, -1, 7):
            with shared_by(5), programs_in_order(stride):
                outputs.append(attend_pages(q, gates, rows, numbers(case), tile=SMALL))
    finally:
        torch.use_deterministic_algorithms(False)
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


@pytest.mark.parametrize(
    ("outputs", "rows", "programs"),
    [(4, 1024, 9), (20, 1024, 7), (64, 1024, 3), (65, 1024, 1), (1, 10**6, 129), (4, 256, 3), (4, 255, 1), (4, 0, 1)],
)
def test_few_outputs_with_many_rows_are_shared_by_more_programs(outputs: int, rows: int, programs: int) -> None:
    """Each attends to 128 rows at least, and all together are about as many as a GPU has multiprocessors."""
    assert fused._programs_per_output(outputs, rows) == programs


@pytest.mark.parametrize("least_rows", [1, 16, 64])
def test_into_however_many_parts_the_keys_are_cut_they_are_all_read_once(
    monkeypatch: pytest.MonkeyPatch, least_rows: int
) -> None:
    case = ((90, 1, 17), 4, 2, 8, 4, 50, 16, 2)
    q, gates, rows = pages(case)
    monkeypatch.setattr(fused, "MIN_PART_ROWS", least_rows)
    ours = attend_pages(q, gates, rows, numbers(case), tile=SMALL)
    torch.testing.assert_close(ours, by_torch(q, gates, rows, numbers(case)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [CASES[0], CASES[2], CASES[3], ((400, 130), 4, 2, 2, 6, 8, 16, 2), ((300,), 4, 2, 2, 130, 8, 16, 2)],
    ids=str,
)
def test_the_blocks_are_those_that_training_chooses(case: tuple) -> None:
    """Also of more blocks, and for more places, than a chunk of the kernel has."""
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
    ours, *again = (attend_pages(q, gates, rows, numbers(case)) for _ in range(20))
    assert (ours - exact).abs().max() <= 2 * theirs
    assert all(torch.equal(one, ours) for one in again)
