"""Decoding with a cache says what the parallel forward says, and notices a forward that looks ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, cycle

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from touched import Touched

from nsa_attention import kv_cache
from nsa_attention.branches import BlockSelector, CompressedBranch, SlidingBranch
from nsa_attention.config import ALL_BRANCHES, Attention, Branch, Compression, Implementation, NSAConfig
from nsa_attention.decode import new_caches, next_logits, prefill, step
from nsa_attention.kv_cache import KVCache
from nsa_attention.model import TinyLM
from nsa_attention.ops import cached_attention
from nsa_attention.ops.cached_attention import Kind, selected_blocks
from nsa_attention.ops.selection import EMPTY, Selection
from nsa_attention.world import CannotRunError

SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(ALL_BRANCHES, size)]
TOKENS = 37
TOLERANCE = 1e-10
GROUPS = 2  # of the tiny shape


def sharp_model(config: NSAConfig, implementation: Implementation = Implementation.AUTO) -> TinyLM:
    """In float64, with queries so long that it matters which keys are seen."""
    model = TinyLM.from_config(config, implementation).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.mul_(6.0)
    return model


def tokens(config: NSAConfig, length: int, batch: int = 2) -> Tensor:
    return torch.randint(config.vocab, (batch, length))


def one_by_one(model: TinyLM, inputs: Tensor) -> Tensor:
    caches = new_caches(model, len(inputs))
    return torch.cat([step(model, token, caches) for token in inputs.split(1, 1)], 1)


def in_chunks(model: TinyLM, inputs: Tensor, prompt: int, sizes: Iterator[int]) -> Tensor:
    logits, caches = prefill(model, inputs[:, :prompt])
    parts = [logits]
    while (done := length(caches)) < inputs.shape[1]:
        parts.append(step(model, inputs[:, done : done + next(sizes)], caches))
    return torch.cat(parts, 1)


def length(caches: list[KVCache]) -> int:
    (tokens,) = set(caches[0].lengths)
    return tokens


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize("compression", list(Compression))
class TestEverySetOfBranches:
    def test_tokens_one_by_one_equal_the_parallel_forward(
        self, tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression
    ) -> None:
        model = sharp_model(replace(tiny, branches=branches, compression=compression))
        inputs = tokens(tiny, TOKENS)
        assert_same(one_by_one(model, inputs), model(inputs))

    def test_a_prompt_and_chunks_equal_the_parallel_forward(
        self, tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression
    ) -> None:
        model = sharp_model(replace(tiny, branches=branches, compression=compression))
        inputs = tokens(tiny, TOKENS)
        expected = model(inputs)
        for prompt in (0, 1, 4, 5, 6, 7, 13, TOKENS):  # around l = 6 and l' = 5, an odd one, and all
            assert_same(in_chunks(model, inputs, prompt, cycle((9, 1, 2))), expected)


@pytest.mark.parametrize(
    "lengths",
    [(1, 1, 1, 3, 1), (8, 8, 8, 3, 16), (7, 2, 16, 3, 64), (4, 3, 3, 20, 2), (24, 8, 5, 4, 7), (40, 9, 5, 4, 7)],
    ids=str,
)
def test_other_lengths_decode_alike(tiny: NSAConfig, lengths: tuple[int, ...]) -> None:
    """l, d, l', n, w: single tokens, l = d, more places than blocks, a choice before the first block, and no block."""
    names = ("block_len", "block_stride", "select_len", "select_count", "window")
    model = sharp_model(replace(tiny, layers=1, **dict(zip(names, lengths, strict=True))))
    inputs = tokens(tiny, 33, batch=3)
    expected = model(inputs)
    assert_same(one_by_one(model, inputs), expected)
    assert_same(in_chunks(model, inputs, 2, cycle((5,))), expected)


def test_the_dense_control_decodes_alike(tiny: NSAConfig) -> None:
    model = sharp_model(replace(tiny, attention=Attention.VANILLA))
    inputs = tokens(tiny, TOKENS)
    expected = model(inputs)
    assert_same(one_by_one(model, inputs), expected)
    for prompt in (0, 1, 6, TOKENS):
        assert_same(in_chunks(model, inputs, prompt, cycle((1, 9))), expected)


@pytest.mark.parametrize("attention", [Attention.NSA, Attention.VANILLA])
def test_a_chunk_that_is_worked_on_in_pieces_gives_the_same(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch, attention: Attention
) -> None:
    model = sharp_model(replace(tiny, attention=attention))
    inputs = tokens(tiny, 60)
    monkeypatch.setattr(kv_cache, "MAX_CHUNK_TOKENS", 16)
    assert_same(in_chunks(model, inputs, 3, cycle((57,))), model(inputs))


@pytest.mark.parametrize("branches", [ALL_BRANCHES, (Branch.SEL,)], ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize(("prompt", "size"), [(0, 1), (3, 7)], ids=["one by one", "in chunks"])
def test_the_same_blocks_are_chosen_in_the_same_order(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch, branches: tuple[Branch, ...], prompt: int, size: int
) -> None:
    model = sharp_model(replace(tiny, branches=branches, layers=1))
    parallel: list[Tensor] = []
    model.blocks[0].attn.sel.chooser.register_forward_hook(lambda _, __, indices: parallel.append(indices))
    inputs = tokens(tiny, TOKENS)
    model(inputs)
    decoded = spied_choices(monkeypatch)
    in_chunks(model, inputs, prompt, cycle((size,)))
    rows = [functional.pad(row, (0, tiny.select_count - row.shape[-1]), value=EMPTY) for row in decoded]
    assert torch.equal(torch.cat(rows, 2), parallel[0][:, :, prompt:])
    assert parallel[0].unique().tolist() == [-1, *range(8)]  # every block is somebody's choice


def spied_choices(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    found: list[Tensor] = []
    original = cached_attention.selected_blocks

    def spy(*arguments: object) -> Tensor:
        indices_NCn = original(*arguments)
        found.append(indices_NCn.unflatten(0, (-1, GROUPS)))
        return indices_NCn

    monkeypatch.setattr(cached_attention, "selected_blocks", spy)
    return found


def test_equally_important_blocks_go_to_the_lower_index(tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of zero like every key alike: the fourth of four places goes to block 1."""
    model = TinyLM.from_config(replace(tiny, layers=1, block_len=5, block_stride=5)).double()
    torch.nn.init.zeros_(model.blocks[0].attn.q_proj.weight)
    decoded = spied_choices(monkeypatch)
    one_by_one(model, tokens(tiny, 31))
    assert decoded[-1].flatten(0, 2).tolist() == [[0, 5, 6, 1]] * 4


Leak = Callable[[pytest.MonkeyPatch], None]


def block_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CompressedBranch.forward

    def forward(self: CompressedBranch, q: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
        output, lse = original(self, torch.cat((q[:, :, :1], q), 2), *rest)
        return output[:, :, 1:], lse[:, :, 1:]

    monkeypatch.setattr(CompressedBranch, "forward", forward)


def window_one_token_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlidingBranch.forward

    def forward(self: SlidingBranch, q: Tensor, k: Tensor, v: Tensor, layout: None) -> Tensor:
        return original(self, q, k.roll(-1, 2), v.roll(-1, 2), layout)

    monkeypatch.setattr(SlidingBranch, "forward", forward)


def choice_of_the_next_query(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockSelector.forward

    def forward(self: BlockSelector, q: Tensor, *rest: Tensor | None) -> Tensor:
        return original(self, torch.cat((q[:, :, 1:], q[:, :, -1:]), 2), *rest)

    monkeypatch.setattr(BlockSelector, "forward", forward)


@pytest.mark.parametrize(
    ("leak", "branches", "first_wrong"),
    [
        (block_one_token_early, (Branch.CMP, Branch.WIN), range(4, 5)),  # the block of tokens 0 to 5 is seen at 4
        (window_one_token_ahead, (Branch.CMP, Branch.SEL, Branch.WIN), range(1)),
        (
            choice_of_the_next_query,
            (Branch.SEL,),
            range(20, TOKENS),
        ),  # four places leave a choice from the fifth block on
    ],
    ids=["compressed", "sliding", "selected"],
)
def test_a_parallel_forward_that_looks_ahead_is_noticed(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch, leak: Leak, branches: tuple[Branch, ...], first_wrong: range
) -> None:
    model = sharp_model(replace(tiny, layers=1, branches=branches), Implementation.EAGER)
    inputs = tokens(tiny, TOKENS)
    assert_same(one_by_one(model, inputs), model(inputs))
    leak(monkeypatch)
    wrong = (one_by_one(model, inputs) - model(inputs)).abs().amax((0, 2)) > 1e-6
    assert int(wrong.nonzero()[0]) in first_wrong


def test_a_step_reads_no_key_but_those_of_the_chosen_blocks(tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model(replace(tiny, layers=1))
    inputs = tokens(tiny, TOKENS)
    expected = model(inputs)[:, -1:]
    (_, caches), (_, poisoned) = prefill(model, inputs[:, :-1]), prefill(model, inputs[:, :-1])
    decoded = spied_choices(monkeypatch)
    step(model, inputs[:, -1:], caches)
    of_block = torch.arange(TOKENS - 1) // tiny.select_len
    unread_BGT = (decoded[0].transpose(2, 3) != of_block).all(2)
    assert unread_BGT.any(-1).all()
    for rows in poisoned[0].rows[Kind.TOKENS]:
        rows[:, :, : TOKENS - 1].masked_fill_(unread_BGT.unsqueeze(-1), torch.nan)
    assert_same(step(model, inputs[:, -1:], poisoned), expected)


@pytest.mark.parametrize("prompt", [0, 36, 100])
def test_window_and_uncompressed_tokens_take_constant_memory(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    monkeypatch.setattr(kv_cache, "MAX_CHUNK_TOKENS", 4)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 1)
    model = TinyLM.from_config(replace(tiny, layers=1))
    inputs = tokens(tiny, 130)
    _, caches = prefill(model, inputs[:, :prompt])
    for token in inputs[:, prompt:].split(1, 1):
        step(model, token, caches)
        cache = caches[0]
        assert all(rows.shape[1] == tiny.block_len - 1 for rows in cache.recent)
        in_use = min(length(caches), tiny.window - 1 + 4)
        capacities = [{rows.shape[2] for rows in cache.rows[kind]} for kind in Kind]
        blocks = max(0, (length(caches) - tiny.block_len) // tiny.block_stride + 1)
        # The next power of two: of all tokens, of the blocks, and of a window and the tokens that are new at once.
        assert capacities == [{1 << (count - 1).bit_length()} for count in (max(1, blocks), length(caches), in_use)]
        # No view: what is kept holds nothing else in memory.
        kept = [*cache.recent, *cache.rows[Kind.WINDOW]]
        assert all(rows.untyped_storage().nbytes() == rows.numel() * rows.element_size() for rows in kept)


def test_a_cache_grows_by_doubling_and_copies_nothing_in_between(
    tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 8)
    model = sharp_model(replace(tiny, layers=1))
    inputs = tokens(tiny, 70, batch=1)
    caches = new_caches(model, 1)
    seen, places = [], set()
    logits = []
    for token in inputs.split(1, 1):
        logits.append(step(model, token, caches))
        rows = caches[0].rows[Kind.TOKENS][0]
        seen.append(rows.shape[2])
        places.add(rows.data_ptr())
    assert sorted(set(seen)) == [8, 16, 32, 64, 128]
    assert [seen.index(capacity) for capacity in (16, 32, 64, 128)] == [8, 16, 32, 64]
    assert len(places) <= 5
    assert_same(torch.cat(logits, 1), model(inputs))


def test_rows_of_a_long_prompt_leave_room_for_the_first_tokens(tiny: NSAConfig) -> None:
    model, inputs = TinyLM.from_config(tiny), tokens(tiny, 129)
    _, caches = prefill(model, inputs[:, :100])
    before = [rows.clone() for rows in caches[0].rows[Kind.TOKENS]]
    assert [rows.shape[2] for rows in before] == [128, 128]
    step(model, inputs[:, 100:], caches)
    for rows, old in zip(caches[0].rows[Kind.TOKENS], before, strict=True):
        assert rows.shape[2] == 256
        assert torch.equal(rows[:, :, :100], old[:, :, :100])


@pytest.mark.parametrize("attention", [Attention.NSA, Attention.VANILLA])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "autocast"])
def test_an_error_is_at_most_twice_that_of_the_parallel_forward(
    tiny: NSAConfig, kind: str, attention: Attention
) -> None:
    """Every block has a place, so that rounding decides no choice; and every norm the same epsilon, not its dtype's."""
    config = replace(tiny, attention=attention, select_count=8, d_v=6)
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    model = TinyLM.from_config(config).to(dtype)
    exact = TinyLM.from_config(config).double()
    exact.load_state_dict(model.state_dict())
    exact.get_buffer("frequencies").copy_(model.get_buffer("frequencies"))
    inputs = tokens(tiny, 40)
    expected = exact(inputs)
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
        parallel, alone = model(inputs), one_by_one(model, inputs)
        chunked = in_chunks(model, inputs, 7, cycle((9,)))
    limit = 2 * (parallel - expected).abs().max()
    assert alone.dtype is parallel.dtype
    assert (alone - expected).abs().max() <= limit
    assert (chunked - expected).abs().max() <= limit


def test_huge_logits_stay_finite(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.mul_(1e15)
    inputs = tokens(tiny, TOKENS)
    assert one_by_one(model, inputs).isfinite().all()
    assert in_chunks(model, inputs, 3, cycle((4,))).isfinite().all()


def test_the_logits_of_the_last_token_alone_are_those_of_the_chunk(tiny: NSAConfig) -> None:
    model = sharp_model(tiny)
    inputs = tokens(tiny, 12)
    assert_same(next_logits(model, inputs, new_caches(model, 2)), prefill(model, inputs)[0][:, -1])


def test_decoding_builds_no_graph_and_an_empty_prompt_is_one(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny)
    logits, caches = prefill(model, tokens(tiny, 0))
    assert (logits.shape, length(caches)) == ((2, 0, tiny.vocab), 0)
    assert not step(model, tokens(tiny, 3), caches).requires_grad
    assert length(caches) == 3


def test_tokens_of_another_batch_are_refused(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny)
    _, caches = prefill(model, tokens(tiny, 3))
    with pytest.raises(ValueError, match="tokens: 3 sequences, but the cache has 2; start a new one with prefill"):
        step(model, tokens(tiny, 1, batch=3), caches)


def test_the_stock_control_says_that_it_cannot(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(replace(tiny, attention=Attention.STOCK))
    with pytest.raises(CannotRunError, match="attention stock is torch's own layer, which gives no keys"):
        prefill(model, tokens(tiny, 3))


def test_the_control_keeps_every_key_and_the_layer_only_what_it_may_look_at(tiny: NSAConfig) -> None:
    _, caches = prefill(TinyLM.from_config(replace(tiny, branches=(Branch.WIN,))), tokens(tiny, TOKENS))
    assert all(list(cache.rows) == [Kind.WINDOW] for cache in caches)
    _, caches = prefill(TinyLM.from_config(replace(tiny, attention=Attention.VANILLA)), tokens(tiny, TOKENS))
    assert all(list(cache.rows) == [Kind.TOKENS] for cache in caches)
    assert all(rows.shape[2] >= TOKENS for cache in caches for rows in cache.rows[Kind.TOKENS])


def touched_by_a_step(model: TinyLM, length: int) -> Touched:
    """By one token behind so many."""
    with torch.no_grad():
        inputs = tokens(model.config, length + 1, batch=1)
        _, caches = prefill(model, inputs[:, :-1])
        # What a step of another length has computed is kept.
        step(model, inputs[:, -1:], caches)
        with Touched() as touched:
            step(model, inputs[:, -1:], caches)
    return touched


def test_what_a_step_touches_grows_by_the_compressed_keys_alone(tiny: NSAConfig) -> None:
    """Each is read once, by one softmax for output and choice, and nothing is sorted in full."""
    config = replace(tiny, layers=1, window=64, select_len=16, block_len=16, block_stride=8)
    model = TinyLM.from_config(config)
    short, long = (touched_by_a_step(model, length) for length in (1028, 4100))
    blocks = (4100 - 1028) // config.block_stride
    keys_and_values = blocks * config.groups * (config.d_k + config.d_v)
    passes_over_scores = 22 * blocks * config.heads
    # A selection block for two compressed ones: an addition of three operands a tap, and what ranks it.
    ranking = (4 * 5 + 12) * (blocks // 2) * config.groups
    assert long.elements - short.elements <= keys_and_values + passes_over_scores + ranking
    assert {"sort", "topk"} & long.names == {"topk"}


def test_topk_of_packed_ranks_chooses_what_a_stable_sort_chooses(tiny: NSAConfig) -> None:
    """Bit by bit, with every importance there several times. Weights are 1 and 2, so that float64 has the same ties."""
    numbers = Selection.of(replace(tiny, select_count=7, block_len=8, block_stride=4, select_len=8))
    shares_NShC = torch.randint(3, (2, 60, 3, 4)).float()
    positions = torch.tensor([[240, 241, 250, 300]])
    chosen = selected_blocks(shares_NShC, positions, 40 * 8, numbers)
    assert torch.equal(chosen, selected_blocks(shares_NShC.double(), positions, 40 * 8, numbers))
    assert all(len(row) > len(set(row)) for row in shares_NShC.sum(2).transpose(1, 2).flatten(0, 1).tolist())
