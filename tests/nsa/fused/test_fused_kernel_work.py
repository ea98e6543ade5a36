"""What the model of the kernels' cost counts as passes, against the walks of the kernels, one program at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.kernel_work import cuts_of_blocks, segment_passes, spans_walked, union_sizes
from benchmarks.nsa_choices import selections_of_model
from benchmarks.synthetic_selections import make_selections, mean_union_size, neighbour_overlap
from nsa_attention.config import CI
from nsa_attention.model import TinyLM
from nsa_attention.ops.fused.spanned import Spans, block_spans, window_spans

CPU = torch.device("cpu")


def spans(name: str, tokens: int) -> Spans:
    blocks = max(0, (tokens - 32) // 16 + 1)
    if name == "sliding":
        return window_spans(tokens, 40, None, CPU)
    return block_spans(tokens, blocks, 32, 16, None, CPU)


def walked(
    first: Tensor, stop: Tensor, width: int, step: int, parts: int, *, masks_missing: bool = False
) -> list[tuple[int, int]]:
    """As the kernels walk: a step masks unless all spans of the tile hold all of it. (All passes, those that mask.)"""
    counts = []
    for tile in range(0, len(first), width):
        firsts, stops = first[tile : tile + width].tolist(), stop[tile : tile + width].tolist()
        steps = list(range(min(firsts), max(stops), step))
        masks = [begin < max(firsts) or begin + step > min(stops) for begin in steps]
        if masks_missing and len(firsts) < width:
            masks = [True] * len(steps)
        edges, whole = sum(masks), len(steps) - sum(masks)
        for part in range(parts):
            masked = len(range(part, edges, parts))
            counts.append((len(range(part, whole, parts)) + masked, masked))
    return counts


@given(
    st.sampled_from(["sliding", "compressed"]),
    st.integers(48, 700),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([16, 64]),
)
def test_passes_over_keys(name: str, tokens: int, queries: int, keys: int) -> None:
    one = spans(name, tokens)
    passes, edges = spans_walked(one.first_key_T, one.stop_key_T, queries, keys)
    assert list(zip(passes.tolist(), edges.tolist(), strict=True)) == walked(
        one.first_key_T, one.stop_key_T, queries, keys, 1
    )


@given(
    st.sampled_from(["sliding", "compressed"]),
    st.integers(48, 700),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([16, 64]),
    st.sampled_from([1, 4, 16]),
)
def test_passes_over_queries_shared_out_to_parts(name: str, tokens: int, queries: int, keys: int, parts: int) -> None:
    """With atomics, the passes of a tile with missing keys all mask."""
    one = spans(name, tokens)
    walk = (one.first_query_S, one.stop_query_S, keys, queries, parts)
    for missing in (False, True):
        passes, edges = spans_walked(*walk, masks_missing=missing)
        expected = walked(*walk, masks_missing=missing)
        assert list(zip(passes.tolist(), edges.tolist(), strict=True)) == expected


@given(st.integers(1, 400), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.integers(4, 16))
def test_unions_of_tiles(tokens: int, queries: int, shared: float, count: int) -> None:
    indices = make_selections(tokens, count=count, select_len=16, shared=shared)
    sets = [{block for block in row if block >= 0} for row in indices[0, 0].tolist()]
    wanted = [len(set.union(*sets[i : i + queries])) for i in range(0, tokens, queries)]
    assert union_sizes(indices, queries, 16).tolist() == wanted


@given(st.integers(1, 400), st.sampled_from([1, 2, 4]), st.floats(0, 1), st.sampled_from([32, 100, 10**4]))
def test_passes_over_the_queries_of_a_block(tokens: int, queries: int, shared: float, length: int) -> None:
    indices = make_selections(tokens, count=8, select_len=16, shared=shared)
    blocks = -(-tokens // 16)
    places = [int((indices == block).sum()) for block in range(blocks)]
    wanted = [-(-min(length, number - begin) // queries) for number in places for begin in range(0, number, length)]
    got = [number for number in segment_passes(indices, 16, length, queries).tolist() if number]
    assert got == wanted
    assert cuts_of_blocks(indices, 16, length).tolist() == [max(1, -(-number // length)) for number in places]


@given(st.integers(1, 2000), st.floats(0, 1), st.integers(4, 20))
def test_made_up_choices_are_ones_that_importance_could_make(tokens: int, shared: float, count: int) -> None:
    indices = make_selections(tokens, count=count, select_len=16, shared=shared, groups=2)
    assert indices.shape == (1, 2, tokens, count)
    for query in range(0, tokens, 37):
        own = query // 16
        for row in indices[0, :, query].tolist():
            named = [block for block in row if block >= 0]
            assert len(set(named)) == len(named) == min(count, own + 1)
            assert {0, own, max(0, own - 1)} <= set(named) <= set(range(own + 1))


@pytest.mark.parametrize("shared", [0.8, 0.95, 0.98])
def test_neighbours_share_as_many_choices_as_asked_for(shared: float) -> None:
    assert neighbour_overlap(make_selections(32768, shared=shared)) == pytest.approx(shared, abs=0.02)


def test_the_unions_of_all_tiles_on_average() -> None:
    indices = make_selections(500, count=6, select_len=16, shared=0.9, groups=2)
    both = [union_sizes(indices[:, [group]], 4, 16).float() for group in range(2)]
    assert mean_union_size(indices, 4) == pytest.approx(float(torch.cat(both).mean()))


def test_a_models_choices_are_seen_layer_by_layer_with_other_places_than_it_has() -> None:
    model = TinyLM.from_config(CI)
    found = selections_of_model(CI, model.state_dict(), 300, count=8, select_len=16)
    assert len(found) == CI.layers
    for indices in found.values():
        assert indices.shape == (1, CI.groups, 300, 8)
        assert {0, 18, 17} <= set(indices[0, 0, 299].tolist())
