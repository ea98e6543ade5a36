"""Decoding from pages says what decoding from one memory says, whatever else shares the pages, and holds no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, cycle

import pytest
import torch
from torch import Tensor, nn
from touched import Touched

from nsa_attention import pages as page_tables
from nsa_attention.config import ALL_BRANCHES, Attention, Branch, Compression, Implementation, NSAConfig
from nsa_attention.decode import new_caches, next_logits, prefill, step
from nsa_attention.generate import generate, generate_each
from nsa_attention.kv_cache import KVCache
from nsa_attention.model import TinyLM
from nsa_attention.ops import cached_attention
from nsa_attention.ops.cached_attention import Kind
from nsa_attention.ops.dispatch import MissingImplementationError
from nsa_attention.pages import OutOfPagesError, PageTable, default_page_size, pages_needed
from nsa_attention.world import CannotRunError

SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(ALL_BRANCHES, size)]
TOKENS = 37
TOLERANCE = 1e-10
ENOUGH = 200


def sharp_model(config: NSAConfig, implementation: Implementation = Implementation.AUTO) -> TinyLM:
    """In float64, with queries so long that it matters which keys are seen, and a head that repeats no token."""
    model = TinyLM.from_config(config, implementation).double()
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.mul_(6.0)
    return model


def tokens(config: NSAConfig, *shape: int) -> Tensor:
    return torch.randint(config.vocab, shape)


def paged(model: TinyLM, sequences: int = 2, page_size: int | None = None, pages: int = ENOUGH) -> list[KVCache]:
    return new_caches(model, sequences, pages=pages, page_size=page_size)


def read_in_steps(model: TinyLM, inputs: Tensor, caches: list[KVCache], sizes: Iterator[int]) -> Tensor:
    parts, done = [], 0
    while done < inputs.shape[1]:
        size = next(sizes)
        parts.append(step(model, inputs[:, done : done + size], caches))
        done += size
    return torch.cat(parts, 1)


def alone(model: TinyLM, inputs_T: Tensor) -> Tensor:
    """Logits [T, vocab] of one sequence from a memory of its own."""
    return read_in_steps(model, inputs_T[None], new_caches(model, 1), cycle((1,)))[0]


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize("compression", [Compression.MLP, Compression.MEAN])
def test_pages_say_what_one_memory_says(
    tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression
) -> None:
    model = sharp_model(replace(tiny, branches=branches, compression=compression))
    inputs = tokens(tiny, 2, TOKENS)
    expected = read_in_steps(model, inputs, new_caches(model, 2), cycle((1,)))
    for page_size, sizes in ((5, (1,)), (None, (13, 1, 3)), (10, (TOKENS,))):
        assert_same(read_in_steps(model, inputs, paged(model, page_size=page_size), cycle(sizes)), expected)


@pytest.mark.parametrize(
    "lengths",
    [(1, 1, 1, 3, 1), (8, 8, 8, 3, 16), (7, 2, 16, 3, 64), (4, 3, 3, 20, 2), (24, 8, 5, 4, 7), (40, 9, 5, 4, 7)],
    ids=str,
)
def test_other_lengths_lie_in_pages_alike(tiny: NSAConfig, lengths: tuple[int, ...]) -> None:
    """l, d, l', n, w: single tokens, l = d, more places than blocks, a choice before the first block, and no block."""
    names = ("block_len", "block_stride", "select_len", "select_count", "window")
    config = replace(tiny, layers=1, **dict(zip(names, lengths, strict=True)))
    model, inputs = sharp_model(config), tokens(tiny, 2, 33)
    expected = read_in_steps(model, inputs, new_caches(model, 2), cycle((1,)))
    for prompt in (1, 2, 20):
        caches = paged(model, page_size=config.select_len)
        assert_same(read_in_steps(model, inputs, caches, iter([prompt, *[1] * 33])), expected)


def test_in_float32_the_logits_are_those_of_one_memory(tiny: NSAConfig) -> None:
    model, inputs = TinyLM.from_config(tiny), tokens(tiny, 2, TOKENS)
    expected = read_in_steps(model, inputs, new_caches(model, 2), cycle((1,)))
    assert_same(read_in_steps(model, inputs, paged(model), cycle((1,))), expected, 1e-6)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "autocast"])
def test_an_error_is_at_most_twice_that_of_the_parallel_forward(tiny: NSAConfig, kind: str) -> None:
    """Every block has a place, so that rounding decides no choice."""
    config = replace(tiny, select_count=8)
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    model, exact = TinyLM.from_config(config).to(dtype), TinyLM.from_config(config).double()
    exact.load_state_dict(model.state_dict())
    exact.get_buffer("frequencies").copy_(model.get_buffer("frequencies"))
    inputs = tokens(config, 2, 40)
    expected = exact(inputs)
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
        parallel, ours = model(inputs), read_in_steps(model, inputs, paged(model), iter([7, *[1] * 33]))
    assert ours.dtype is parallel.dtype
    assert (ours - expected).abs().max() <= 2 * (parallel - expected).abs().max()


def test_sequences_of_different_lengths_do_not_know_of_each_other(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin and end at different times, in numbers that others had before; some read more than one token."""
    monkeypatch.setattr(page_tables, "MIN_COLUMNS", 1)  # so that the table grows under them
    model = sharp_model(tiny)
    caches = paged(model, sequences=3, page_size=5)
    first, second, third, fourth = (tokens(tiny, length) for length in (30, 12, 25, 9))
    expected = [alone(model, one) for one in (first, second, third, fourth)]

    def assert_last(fresh: dict[int, Tensor], *rows: Tensor) -> None:
        assert_same(next_logits(model, fresh, caches), torch.stack(rows))

    assert_last({0: first[:20], 2: second[:1]}, expected[0][19], expected[1][0])
    for place in range(1, 8):
        fresh = {2: second[place : place + 1], 0: first[19 + place : 20 + place]}
        assert_last(fresh, expected[1][place], expected[0][19 + place])
    assert_last({1: third[:7], 2: second[8:12], 0: first[27:]}, expected[2][6], expected[1][11], expected[0][29])
    assert caches[0].lengths == [30, 7, 12]
    caches[0].end(0)
    assert_last({0: fourth[:8], 1: third[7:25]}, expected[3][7], expected[2][24])
    assert_last({0: fourth[8:]}, expected[3][8])
    assert caches[0].lengths == [9, 25, 12]


def table_of(caches: list[KVCache]) -> PageTable:
    table = caches[0].sequences.pages
    assert table is not None
    return table


def held(caches: list[KVCache], sequence: int) -> dict[Kind, list[int]]:
    return {kind: list(pages.values()) for kind, pages in table_of(caches).owned[sequence].items() if pages}


@pytest.mark.parametrize("prompt", [1, 23])
def test_a_sequence_holds_pages_for_what_later_tokens_look_at_and_no_others(tiny: NSAConfig, prompt: int) -> None:
    config = replace(tiny, layers=1)
    model = TinyLM.from_config(config)
    caches, inputs = paged(model, page_size=5), tokens(tiny, 60)
    most = 0
    for length in (prompt, *[1] * (60 - prompt)):
        end = caches[0].lengths[1] + length
        next_logits(model, {1: inputs[end - length : end]}, caches)
        blocks = max(0, (end - tiny.block_len) // tiny.block_stride + 1)
        seen_from = max(0, end - tiny.window + (length > 1))
        counts = {kind: len(pages) for kind, pages in held(caches, 1).items()}
        window = -(-end // 5) - seen_from // 5
        assert counts == {
            kind: pages
            for kind, pages in ((Kind.BLOCKS, -(-blocks // 5)), (Kind.TOKENS, -(-end // 5)), (Kind.WINDOW, window))
            if pages
        }
        assert caches[0].free_pages == ENOUGH - sum(counts.values())
        assert sum(counts.values()) <= pages_needed(tiny, end, 5)
        most = max(most, counts[Kind.WINDOW])
    everything = [page for pages in held(caches, 1).values() for page in pages]
    assert len(set(everything)) == len(everything)
    assert most == 3  # 7 tokens over pages of 5
    caches[0].end(1)
    assert caches[0].free_pages == ENOUGH


def test_what_a_sequence_takes_at_most_is_enough_and_one_page_less_is_not(tiny: NSAConfig) -> None:
    model, prompt, needed = sharp_model(tiny), tokens(tiny, 1, 4), pages_needed(tiny, 40, 5)
    expected = generate(model, prompt, 36)
    assert torch.equal(generate(model, prompt, 36, caches=paged(model, 1, 5, needed)), expected)
    with pytest.raises(OutOfPagesError):
        generate(model, prompt, 36, caches=paged(model, 1, 5, needed - 1))


def test_a_pool_that_is_full_says_so_before_anything_is_read(tiny: NSAConfig) -> None:
    model = sharp_model(tiny)
    caches = paged(model, page_size=5, pages=12)
    inputs = tokens(tiny, 2, 20)
    expected = alone(model, inputs[0])
    next_logits(model, {0: inputs[0, :15], 1: inputs[1, :6]}, caches)
    before = caches[0].free_pages, caches[0].lengths
    message = (
        rf"pages: 6 more are needed for 12 tokens of 2 sequences, and {before[0]} of 12 are free, of 5 rows each; "
        r"end a sequence, or give the cache more pages \(--pages\)"
    )
    with pytest.raises(OutOfPagesError, match=message):
        next_logits(model, {0: inputs[0, 15:16], 1: inputs[1, 6:17]}, caches)
    assert (caches[0].free_pages, caches[0].lengths) == before
    caches[0].end(1)
    assert_same(next_logits(model, {0: inputs[0, 15:]}, caches)[0], expected[-1])


def test_what_other_sequences_left_in_a_page_is_read_by_nobody(tiny: NSAConfig) -> None:
    """Also where it is no number, as of a sequence that has overflowed."""
    model = sharp_model(tiny)
    caches, inputs = paged(model, page_size=10), tokens(tiny, TOKENS)
    next_logits(model, {0: tokens(tiny, 60), 1: tokens(tiny, 5)}, caches)
    for cache in caches:
        for tensor in cache.rows[Kind.TOKENS]:
            tensor.fill_(torch.nan)
    caches[0].end(0)
    expected = alone(model, inputs)
    assert_same(next_logits(model, {0: inputs[:1]}, caches)[0], expected[0])
    for place in range(1, TOKENS):
        fresh = {0: inputs[place : place + 1], 1: tokens(tiny, 1)}
        assert_same(next_logits(model, fresh, caches)[0], expected[place])


@pytest.mark.parametrize("branch", [Kind.TOKENS, Kind.WINDOW])
def test_a_step_reads_no_key_but_those_it_may_see(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch, branch: Kind
) -> None:
    config = replace(tiny, layers=1)
    model, inputs = sharp_model(config), tokens(tiny, 1, TOKENS)
    found: list[Tensor] = []
    original = cached_attention.selected_blocks
    monkeypatch.setattr(cached_attention, "selected_blocks", lambda *all_: found.append(original(*all_)) or found[-1])
    expected = alone(model, inputs[0])[-1]
    caches = paged(model, sequences=1)
    step(model, inputs[:, :-1], caches)
    keys, values = caches[0].rows[Kind.TOKENS]
    page_size = table_of(caches).page_size
    for token in range(TOKENS - 1):
        for group in range(tiny.groups):
            of_window = token > TOKENS - 1 - tiny.window
            seen = of_window if branch is Kind.WINDOW else token // tiny.select_len in found[-1][group].flatten()
            page = table_of(caches).owned[0][branch].get(token // page_size)
            if not seen and page is not None:
                keys[page, group, token % page_size] = values[page, group, token % page_size] = torch.nan
    assert keys.isnan().any()
    assert_same(step(model, inputs[:, -1:], caches)[0, 0], expected)


def test_generation_from_pages_writes_the_same_tokens(tiny: NSAConfig) -> None:
    model, prompt = sharp_model(tiny), tokens(tiny, 2, 4)
    expected = generate(model, prompt, 30)
    assert torch.equal(generate(model, prompt, 30, caches=paged(model)), expected)
    assert expected[:, 4:].unique().numel() > 5


def test_prompts_of_different_lengths_are_gone_on_with_side_by_side(tiny: NSAConfig) -> None:
    """Each until it has its tokens; the pages of the first ones to end are those of the last ones to go on."""
    model, counts = sharp_model(tiny), (3, 40, 0, 9)
    prompts = [tokens(tiny, length) for length in (30, 2, 4, 17)]
    caches = paged(model, sequences=4, page_size=5, pages=24)
    written = generate_each(model, prompts, counts, caches)
    for prompt, count, ours in zip(prompts, counts, written, strict=True):
        assert torch.equal(ours, generate(model, prompt[None], count)[0])
    assert (caches[0].free_pages, caches[0].lengths) == (24, [0] * 4)
    assert sum(pages_needed(tiny, len(prompt) + count, 5) for prompt, count in zip(prompts, counts, strict=True)) > 24


def test_what_cannot_lie_in_pages_is_said(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny)
    with pytest.raises(
        CannotRunError, match="page size: expected a multiple of 5, the length of a selected block, got 8"
    ):
        paged(model, page_size=8)
    with pytest.raises(CannotRunError, match="attention vanilla has no branches to keep in pages"):
        paged(TinyLM.from_config(replace(tiny, attention=Attention.VANILLA)))
    with pytest.raises(ValueError, match="tokens: 3 sequences, but the cache has 2"):
        step(model, tokens(tiny, 3, 1), paged(model))
    with pytest.raises(ValueError, match="sequences: expected different numbers from 0 to 1, got -1, 2"):
        next_logits(model, {2: tokens(tiny, 1), 0: tokens(tiny, 1), -1: tokens(tiny, 1)}, paged(model))
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
        generate_each(model, [tokens(tiny, 0)], [1], paged(model))


def test_what_reads_no_pages_is_refused_by_name(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny, Implementation.DENSE)
    with pytest.raises(MissingImplementationError, match="--impl dense: pages are read by plain torch or by the fused"):
        step(model, tokens(tiny, 2, 1), paged(model))


def test_a_page_holds_whole_selection_blocks_and_whole_pieces_of_sixteen(tiny: NSAConfig) -> None:
    assert {size: default_page_size(replace(tiny, select_len=size)) for size in (1, 5, 16, 24, 32, 64)} == {
        1: 16, 5: 80, 16: 16, 24: 48, 32: 32, 64: 64,
    }  # fmt: skip


def test_an_empty_chunk_changes_nothing(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny)
    caches = paged(model)
    assert step(model, tokens(tiny, 2, 0), caches).shape == (2, 0, tiny.vocab)
    assert (caches[0].lengths, caches[0].free_pages) == ([0, 0], ENOUGH)
    logits, _ = prefill(model, tokens(tiny, 2, 0))
    assert logits.shape == (2, 0, tiny.vocab)


def touched_by_a_step(model: TinyLM, length: int) -> Touched:
    caches = paged(model, sequences=1, page_size=64, pages=ENOUGH)
    inputs = tokens(model.config, 1, length + 2)
    step(model, inputs[:, :-2], caches)
    step(model, inputs[:, -2:-1], caches)  # what a step of another length has computed is kept
    with torch.no_grad(), Touched() as touched:
        step(model, inputs[:, -1:], caches)
    return touched


def test_what_a_step_touches_grows_by_the_compressed_keys_alone(tiny: NSAConfig) -> None:
    """Plain torch gathers them, which is once more to read and to write; the pages themselves stay where they are."""
    config = replace(tiny, layers=1, window=64, select_len=16, block_len=16, block_stride=8)
    model = TinyLM.from_config(config)
    short, long = (touched_by_a_step(model, length) for length in (1028, 4100))
    blocks, tokens_more = (4100 - 1028) // config.block_stride, 4100 - 1028
    keys_and_values = 5 * blocks * config.groups * (config.d_k + config.d_v)
    passes_over_scores = 22 * blocks * config.heads
    ranking = (4 * 5 + 12) * (blocks // 2) * config.groups
    places = 20 * blocks * config.groups
    tables = 8 * config.groups * tokens_more // 64
    assert long.elements - short.elements <= keys_and_values + passes_over_scores + ranking + places + tables
