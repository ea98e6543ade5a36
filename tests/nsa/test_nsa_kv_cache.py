"""A layer without a model decodes with its cache: the outputs are those of its full forward pass."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, cycle

import pytest
import torch
from torch import Tensor

from nsa_attention.attention import NSAttention
from nsa_attention.config import ALL_BRANCHES, Branch, Compression, NSAConfig
from nsa_attention.kv_cache import KVCache
from nsa_attention.pages import OutOfPagesError
from nsa_attention.world import CannotRunError

SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(ALL_BRANCHES, size)]
CACHES = [{}, {"max_tokens": 40}, {"page_size": 5, "pages": 100}, {"max_tokens": 40, "page_size": 10}]
TOKENS = 40
TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


def sharp_layer(config: NSAConfig) -> NSAttention:
    """In float64, with queries so long that it matters which keys are seen."""
    layer = NSAttention.from_config(config).double()
    layer.q_proj.weight.mul_(6.0)
    return layer


def in_pieces(layer: NSAttention, x: Tensor, cache: KVCache, sizes: tuple[int, ...]) -> Tensor:
    outputs, size = [], cycle(sizes)
    while (done := cache.lengths[0]) < x.shape[1]:
        outputs.append(layer(x[:, done : done + next(size)], cache=cache))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
def test_prompts_tokens_and_chunks_equal_the_full_forward(
    tiny: NSAConfig, branches: tuple[Branch, ...], options: dict[str, int]
) -> None:
    layer = sharp_layer(replace(tiny, branches=branches, compression=Compression.MEAN_MLP))
    x = torch.randn(2, TOKENS, tiny.dim, dtype=torch.double)
    expected = layer(x)
    for sizes in ((1,), (TOKENS,), (13, 1, 1, 9), (1, 7)):
        ours = in_pieces(layer, x, layer.new_cache(2, **options), sizes)
        torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_sequences_of_different_lengths_share_a_batch(tiny: NSAConfig, options: dict[str, int]) -> None:
    """They begin, go on and end at different times, alone and together, also where a new one joins an old one."""
    layer = sharp_layer(tiny)
    x = torch.randn(4, TOKENS, tiny.dim, dtype=torch.double)
    expected, cache = layer(x), layer.new_cache(3, **options)
    rows = {0: 0, 1: 1, 2: 2}  # of x, by the number of the sequence

    def append(numbers: list[int], count: int) -> None:
        lengths = dict(enumerate(cache.lengths))
        spans = {number: slice(lengths[number], lengths[number] + count) for number in numbers}
        fresh = torch.stack([x[rows[number], span] for number, span in spans.items()])
        ours = layer(fresh, cache=cache.select(numbers))
        theirs = torch.stack([expected[rows[number], span] for number, span in spans.items()])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)

    append([0], 17)
    append([2, 0], 9)
    append([1], 1)
    for _ in range(6):
        append([0, 1, 2], 1)
    append([2, 1], 5)
    cache.end(0)
    rows[0] = 3
    append([0, 1], 11)
    append([2, 0, 1], 3)
    assert cache.lengths == [14, 26, 23]
    assert cache.select([2, 0]).lengths == [23, 14]


@pytest.mark.parametrize("options", [CACHES[0], CACHES[2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_error_is_at_most_twice_that_of_the_full_forward(
    tiny: NSAConfig, options: dict[str, int], dtype: torch.dtype
) -> None:
    """Both against float64. Every block has a place, so that rounding decides no choice."""
    layer = NSAttention.from_config(replace(tiny, select_count=8)).to(dtype)
    x = torch.randn(2, TOKENS, tiny.dim).to(dtype)
    exact = deepcopy(layer).double()(x.double())
    limit = 2 * (layer(x) - exact).abs().max()
    for sizes in ((1,), (13, 1, 1, 9)):
        ours = in_pieces(layer, x, layer.new_cache(2, **options), sizes)
        assert ours.dtype is dtype
        assert (ours - exact).abs().max() <= limit


@pytest.mark.parametrize("options", [CACHES[0], CACHES[2]], ids=str)
def test_layers_share_lengths_and_pages(tiny: NSAConfig, options: dict[str, int]) -> None:
    layers = [sharp_layer(tiny) for _ in range(3)]
    x = torch.randn(2, TOKENS, tiny.dim, dtype=torch.double)
    expected = x
    for layer in layers:
        expected = expected + layer(expected)
    first = layers[0].new_cache(2, **options)
    caches = [first, *(layer.new_cache(shared_with=first) for layer in layers[1:])]
    alone = layers[0].new_cache(2, **options)
    for start, stop in ((0, 20), (20, 21), (21, TOKENS)):
        y = x[:, start:stop]
        layers[0](y, cache=alone)
        for layer, cache in zip(layers, caches, strict=True):
            y = y + layer(y, cache=cache)
        torch.testing.assert_close(y, expected[:, start:stop], rtol=0, atol=TOLERANCE)
    assert [cache.lengths for cache in caches] == [[TOKENS] * 2] * 3
    assert {cache.free_pages for cache in caches} == {alone.free_pages}
    caches[2].end(1)
    assert first.lengths == [TOKENS, 0]


def test_layers_that_share_must_append_the_same_tokens(tiny: NSAConfig) -> None:
    layers = [sharp_layer(tiny) for _ in range(2)]
    x = torch.randn(2, 6, tiny.dim, dtype=torch.double)
    first = layers[0].new_cache(2)
    second = layers[1].new_cache(shared_with=first)
    layers[0](x, cache=first)
    message = (
        "layers that share sequences must append the same tokens, each layer once; this layer has appended 0 times"
    )
    with pytest.raises(ValueError, match=message):
        layers[1](x[:, :5], cache=second)
    layers[0](x[:, :1], cache=first)
    with pytest.raises(ValueError, match=message + " and another one 2 times"):
        layers[1](x, cache=second)
    with pytest.raises(ValueError, match="shared_with must be an empty cache of a layer with the same lengths"):
        layers[1].new_cache(shared_with=first)
    with pytest.raises(ValueError, match="shared_with must be an empty cache of a layer with the same lengths"):
        sharp_layer(replace(tiny, window=3)).new_cache(shared_with=layers[0].new_cache(2))
    with pytest.raises(ValueError, match="with shared_with, the other cache decides"):
        layers[1].new_cache(2, shared_with=layers[0].new_cache(2))


def test_a_cache_that_cannot_be_is_refused(tiny: NSAConfig) -> None:
    layer = NSAttention.from_config(tiny)
    with pytest.raises(ValueError, match="batch_size: expected the number of sequences, or shared_with"):
        layer.new_cache()
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0; pages: expected at least 1, got -1"):
        layer.new_cache(0, pages=-1)
    with pytest.raises(ValueError, match="pages: expected the number of pages of the pool, or max_tokens"):
        layer.new_cache(2, page_size=5)
    with pytest.raises(
        CannotRunError, match="page size: expected a multiple of 5, the length of a selected block, got 8"
    ):
        layer.new_cache(2, page_size=8, pages=10)


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_tokens_that_do_not_suit_the_cache_are_refused_and_change_nothing(
    tiny: NSAConfig, options: dict[str, int]
) -> None:
    layer, x = NSAttention.from_config(tiny), torch.randn(2, 21, tiny.dim)
    cache = layer.new_cache(2, **options)
    expected = layer(x)
    layer(x[:, :20], cache=cache)
    refused = [
        (layer, x[:1], cache, "x: 1 sequences, but the cache has 2; select some of them with cache.select"),
        (layer, x.double(), cache, "x: torch.float64 on cpu, but the cache contains torch.float32 on cpu"),
        (layer, x.to("meta"), cache, "x: torch.float32 on meta, but the cache contains torch.float32 on cpu"),
        (NSAttention.from_config(replace(tiny, d_v=6)), x, cache, "cache: it is of a layer with another shape"),
        (NSAttention.from_config(replace(tiny, window=9)), x, cache, "cache: it is of a layer with another shape"),
    ]
    if "max_tokens" in options:
        refused.append((layer, x, cache, "sequence 0 has 20 tokens and gets 21 more, but max_tokens is 40"))
    for other, tokens, one, message in refused:
        with pytest.raises(ValueError, match=message):
            other(tokens, cache=one)
    for numbers in ([0, 2], [1, 1], [-1], []):
        with pytest.raises(ValueError, match="sequences: expected different numbers from 0 to 1, got"):
            cache.select(numbers)
    with pytest.raises(ValueError, match="sequences: expected different numbers from 0 to 1, got 2"):
        cache.end(2)
    with pytest.raises(ValueError, match="positions and cu_seqlens: expected None, because the cache has positions"):
        layer(x[:, 20:], torch.tensor([20]), cache=cache)
    assert cache.lengths == [20, 20]
    torch.testing.assert_close(layer(x[:, 20:], cache=cache), expected[:, 20:], rtol=0, atol=1e-5)


def test_a_pool_without_enough_pages_is_refused_before_anything_is_appended(tiny: NSAConfig) -> None:
    layer, x = sharp_layer(tiny), torch.randn(2, 21, tiny.dim, dtype=torch.double)
    cache = layer.new_cache(2, page_size=5, pages=12)
    layer(x[:1, :20], cache=cache.select([0]))
    before = cache.free_pages
    with pytest.raises(OutOfPagesError, match=f"and {before} of 12 are free, of 5 rows each"):
        layer(x[1:], cache=cache.select([1]))
    assert (cache.lengths, cache.free_pages) == ([20, 0], before)
    ours = layer(x[:1, 20:], cache=cache.select([0]))
    torch.testing.assert_close(ours, layer(x[:1])[:, 20:], rtol=0, atol=TOLERANCE)


def test_training_with_a_cache_is_refused(tiny: NSAConfig) -> None:
    layer, x = NSAttention.from_config(tiny), torch.randn(1, 3, tiny.dim)
    cache = layer.new_cache(1)
    with torch.enable_grad():
        with pytest.raises(ValueError, match=r"have no gradients; call the layer under torch\.no_grad\(\)"):
            layer(x, cache=cache)
        layer.requires_grad_(False)
        with pytest.raises(ValueError, match="have no gradients"):
            layer(x.clone().requires_grad_(), cache=cache)
        assert cache.lengths == [0]
        assert not layer(x, cache=cache).requires_grad


def test_a_cache_of_inference_mode_can_be_used_outside(tiny: NSAConfig) -> None:
    layer, x = sharp_layer(tiny), torch.randn(1, 8, tiny.dim, dtype=torch.double)
    cache = layer.new_cache(1)
    with torch.inference_mode():
        first = layer(x[:, :7], cache=cache)
    last = layer(x[:, 7:], cache=cache)
    torch.testing.assert_close(torch.cat((first, last), 1), layer(x), rtol=0, atol=TOLERANCE)


def test_a_maximum_of_tokens_is_allocated_once(tiny: NSAConfig) -> None:
    layer, x = NSAttention.from_config(tiny), torch.randn(1, TOKENS, tiny.dim)
    cache = layer.new_cache(1, max_tokens=TOKENS)
    places = set()
    for token in x.split(1, 1):
        layer(token, cache=cache)
        places.add(tuple(tensor.data_ptr() for rows in cache.rows.values() for tensor in rows))
    assert len(places) == 1
    assert [rows[0].shape[2] for _, rows in sorted(cache.rows.items())] == [12, TOKENS, TOKENS]


def test_no_tokens_change_nothing(tiny: NSAConfig) -> None:
    layer = NSAttention.from_config(tiny)
    cache = layer.new_cache(2)
    assert layer(torch.randn(2, 0, tiny.dim), cache=cache).shape == (2, 0, tiny.dim)
    assert cache.lengths == [0, 0]


def test_a_cache_belongs_to_the_first_layer_that_uses_it(tiny: NSAConfig) -> None:
    """Two layers of one shape could otherwise write to one cache, and both would give wrong outputs."""
    first, second = (NSAttention.from_config(tiny).eval().requires_grad_(False) for _ in range(2))
    cache, x = first.new_cache(2), torch.randn(2, 5, tiny.dim)
    view = cache.select([0, 1])
    with pytest.raises(ValueError, match="1 sequences, but the cache has 2"):
        second(x[:1], cache=cache)  # a call that fails does not bind it
    expected = first(x, cache=cache)
    with pytest.raises(
        ValueError, match="cache: it belongs to another layer; create one for each layer with its new_cache"
    ):
        second(x, cache=view)
    assert cache.lengths == [5, 5]
    loaded = pickle.loads(pickle.dumps(cache))
    torch.testing.assert_close(first(x[:, :1], cache=loaded), first(x[:, :1], cache=cache), rtol=0, atol=0)
    torch.testing.assert_close(expected, first(x))
