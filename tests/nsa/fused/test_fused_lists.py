"""The lists of the selected branch say who chose what, whatever numbers the caller gives."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_harness.nsa.ops.fused import lists

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


def choice_of(indices: Tensor, lengths: list[int], select_len: int) -> lists.QueryBlocks:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    return lists.query_blocks(indices, select_len=select_len, starts=starts if len(lengths) > 1 else None)


@settings(max_examples=60, deadline=None)
@given(selections(), st.sampled_from([1, 2, 8, 32]))
def test_a_tile_walks_each_block_that_its_queries_chose_once_and_in_order(
    selection: tuple[Tensor, list[int], int], queries: int
) -> None:
    sets, firsts = plainly(*selection)
    unions = lists.unions(choice_of(*selection), queries)
    for row, blocks in enumerate(sets):
        for tile in range(unions.count_Nx.shape[1]):
            inside = blocks[tile * queries : (tile + 1) * queries]
            expected = {
                firsts[block]: sum(1 << i for i, own in enumerate(inside) if block in own)
                for block in sorted(set().union(*inside))
            }
            count = int(unions.count_Nx[row, tile])
            walked = unions.first_NxU[row, tile, :count].tolist()
            assert walked == list(expected)
            assert unions.members_NxU[row, tile, :count].tolist() == list(expected.values())


@settings(max_examples=60, deadline=None)
@given(selections(), st.sampled_from([1, 2, 3, 100]))
def test_the_segments_of_a_block_hold_its_queries_in_order(
    selection: tuple[Tensor, list[int], int], length: int
) -> None:
    sets, firsts = plainly(*selection)
    choice = choice_of(*selection)
    segments = lists.segments(choice, length)
    assert choice.first_b[: len(firsts)].tolist() == firsts
    assert set(choice.first_b[len(firsts) :].tolist()) == {len(sets[0])}
    for row, blocks in enumerate(sets):
        begins, numbers = segments.begin_Nb[row].tolist(), segments.segment_Nb[row].tolist()
        for block in range(choice.blocks):
            places = segments.query_NL[row, begins[block] : begins[block + 1]].tolist()
            queries = [query for query in places if query != lists.EMPTY]
            assert queries == [t for t, own in enumerate(blocks) if block in own]
            count = numbers[block + 1] - numbers[block]
            assert count == max(1, -(-len(places) // length))
            assert set(segments.block_Ns[row, numbers[block] : numbers[block + 1]].tolist()) == {block}
        assert all(block == choice.blocks for block in segments.block_Ns[row, numbers[-1] :].tolist())


@settings(max_examples=60, deadline=None)
@given(selections(), st.sampled_from([1, 2, 3, 100]))
def test_only_blocks_of_several_segments_take_room_for_partial_sums_and_it_suffices(
    selection: tuple[Tensor, list[int], int], length: int
) -> None:
    segments = lists.segments(choice_of(*selection), length)
    cuts, rooms = segments.segment_Nb.diff(dim=-1), segments.partial_Nb.diff(dim=-1)
    assert torch.equal(rooms, torch.where(cuts > 1, cuts, 0))
    assert int(segments.segment_Nb[:, -1].max()) <= segments.block_Ns.shape[1]
    assert int(segments.partial_Nb[:, -1].max()) <= segments.partials


def test_a_tile_of_32_queries_keeps_the_highest_bit_apart_from_the_sign() -> None:
    indices = torch.zeros(1, 1, 32, 2, dtype=torch.int32)
    unions = lists.unions(lists.query_blocks(indices, select_len=64, starts=None), lists.MOST_QUERIES)
    assert unions.count_Nx.tolist() == [[1]]
    assert int(unions.members_NxU[0, 0, 0]) == 2**32 - 1


def test_more_tokens_than_32_bits_of_block_times_query_are_sorted_as_64() -> None:
    tokens = 1 << 16
    indices = torch.arange(tokens, dtype=torch.int32).view(1, 1, tokens, 1)
    choice = lists.query_blocks(indices, select_len=1, starts=None)
    segments = lists.segments(choice, 4)
    assert (choice.blocks - 1) * tokens >= 1 << 31
    assert torch.equal(segments.query_NL[0], torch.arange(tokens, dtype=torch.int32))
    assert torch.equal(segments.begin_Nb[0, :tokens], torch.arange(tokens, dtype=torch.int32))
