"""The lists of the selected branch say who chose what, whatever numbers the caller gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.synthetic_selections import neighbour_overlap
from nsa_attention.ops.fused import lists

ODD_NUMBERS = st.sampled_from([-1, -1, -7, 99, 2**31 - 1, -(2**31)])


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, list[int], int]:
    """Indices [1, groups, T, n] with empty places, repeats, later blocks and nonsense; lengths of sequences; l'."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum))
    groups, places = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    size = groups * sum(lengths) * places
    numbers = draw(st.lists(st.integers(0, 4) | ODD_NUMBERS, min_size=size, max_size=size))
    indices = torch.tensor(numbers, dtype=torch.int32).view(1, groups, sum(lengths), places)
    return indices, lengths, draw(st.integers(1, 5))


def plainly(indices: Tensor, lengths: list[int], select_len: int) -> tuple[list[list[set[int]]], list[int]]:
    """The blocks of each query of each group, as numbers in the row, and the first token of each block."""
    firsts: list[int] = []
    sets: list[list[set[int]]] = [[] for _ in indices[0]]
    begin = 0
    for length in lengths:
        base = len(firsts)
        firsts += range(begin, begin + length, select_len)
        for t in range(length):
            for group, blocks in zip(indices[0].tolist(), sets, strict=True):
                blocks.append({base + i for i in group[begin + t] if 0 <= i <= t // select_len})
        begin += length
    return sets, firsts


def packed(lengths: list[int]) -> Tensor | None:
    """The starts, or None for a sequence that fills the row."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32) if len(lengths) > 1 else None


def segments_of(selection: tuple[Tensor, list[int], int], length: int) -> lists.Segments:
    indices, lengths, select_len = selection
    return lists.segments(indices, select_len=select_len, starts=packed(lengths), length=length)


@settings(max_examples=25, deadline=None)
@given(selections(), st.sampled_from([1, 2, 8, 32]))
def test_a_tile_walks_each_block_that_its_queries_chose_once_and_in_order(
    selection: tuple[Tensor, list[int], int], queries: int
) -> None:
    sets, firsts = plainly(*selection)
    indices, lengths, select_len = selection
    unions = lists.unions(indices, select_len=select_len, queries=queries, starts=packed(lengths))
    assert unions.shape == lists.union_shape(indices, queries)
    places = queries * indices.shape[3]
    for row, blocks in enumerate(sets):
        for tile in range(unions.shape[1]):
            inside = blocks[tile * queries : (tile + 1) * queries]
            expected = {
                firsts[block]: sum(1 << i for i, own in enumerate(inside) if block in own)
                for block in sorted(set().union(*inside))
            }
            count, before = unions[row, tile, -lists.UNION_TAIL :].tolist()
            assert unions[row, tile, :count].tolist() == list(expected)
            members = [number % 2**32 for number in unions[row, tile, places : places + count].tolist()]
            assert members == list(expected.values())
            assert before == sum(first + select_len <= tile * queries for first in expected)


@settings(max_examples=25, deadline=None)
@given(selections(), st.sampled_from([1, 2, 3, 100]))
def test_the_segments_of_a_block_hold_its_queries_in_order(
    selection: tuple[Tensor, list[int], int], length: int
) -> None:
    sets, firsts = plainly(*selection)
    tokens, select_len = selection[0].shape[2], selection[2]
    cut = segments_of(selection, length)
    if cut.first_b is not None:
        assert cut.first_b[: len(firsts)].tolist() == firsts
        assert set(cut.first_b[len(firsts) :].tolist()) == {tokens}
    for row, blocks in enumerate(sets):
        begins, behind, numbers, _ = cut.table_4Nb[:, row].tolist()
        for block in range(cut.blocks):
            keys = cut.key_NL[row, begins[block] : begins[block + 1]] - block * tokens
            assert keys.tolist() == [t for t, own in enumerate(blocks) if block in own]
            inside = [t for t in keys.tolist() if t < firsts[block] + select_len] if len(keys) else []
            assert behind[block] - begins[block] == len(inside)
            count = numbers[block + 1] - numbers[block]
            assert count == max(1, -(-len(keys) // length))
            assert set(cut.block_Ns[row, numbers[block] : numbers[block + 1]].tolist()) == {block}
        assert all(block == cut.blocks for block in cut.block_Ns[row, numbers[-1] :].tolist())


@settings(max_examples=25, deadline=None)
@given(selections(), st.sampled_from([1, 2, 3, 100]))
def test_only_blocks_of_several_segments_take_room_for_partial_sums_and_it_suffices(
    selection: tuple[Tensor, list[int], int], length: int
) -> None:
    cut = segments_of(selection, length)
    _, _, numbers_Nb, partial_Nb = cut.table_4Nb
    cuts, rooms = numbers_Nb.diff(dim=-1), partial_Nb.diff(dim=-1)
    assert torch.equal(rooms, torch.where(cuts > 1, cuts, 0))
    assert int(numbers_Nb[:, -1].max()) <= cut.block_Ns.shape[1]
    assert int(partial_Nb[:, -1].max()) <= cut.partials


def test_a_tile_of_32_queries_has_a_bit_for_each() -> None:
    indices = torch.zeros(1, 1, 32, 2, dtype=torch.int32)
    union = lists.unions(indices, select_len=64, queries=lists.MAX_TILE_QUERIES, starts=None)
    # The highest is the sign.
    assert union[0, 0, [0, 64, -2, -1]].tolist() == [0, -1, 1, 0]


def test_more_tokens_than_32_bits_of_block_times_query_are_sorted_as_64() -> None:
    tokens = 46_400
    assert tokens**2 > 2**31
    indices = torch.arange(tokens, dtype=torch.int32).view(1, 1, tokens, 1)
    cut = lists.segments(indices, select_len=1, starts=None, length=4)
    assert cut.key_NL.dtype is torch.int64
    assert torch.equal(cut.key_NL[0] % tokens, torch.arange(tokens))
    assert torch.equal(cut.table_4Nb[0, 0, :tokens], torch.arange(tokens, dtype=torch.int32))


@pytest.mark.parametrize("tokens", [40, 4096])
def test_a_typical_selection_is_shared_by_neighbours_as_in_a_trained_model(tokens: int) -> None:
    indices = torch.zeros(2, 3, tokens, 16, dtype=torch.int32)
    typical = lists.typical_selection(indices, 64)
    assert typical.shape == indices.shape
    assert typical.dtype == indices.dtype
    assert ((typical >= 0) & (typical <= torch.arange(tokens)[:, None] // 64)).all()
    if tokens == 4096:
        assert 0.97 <= neighbour_overlap(typical[:1, :1]) <= 0.99
        # The blocks lie anywhere in the sequence.
        assert typical[0, 0, -1].unique().shape[0] >= 12
