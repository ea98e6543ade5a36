"""Decoding with a cache of keys and values.

The logits equal those of the model's parallel forward pass at the same positions. Tests also use this to find leaks: a
token that is decoded on its own cannot attend to later tokens, because the cache does not contain them. Per layer and
branch the cache stores only what later tokens can attend to.

Dimensions: B batch, C new tokens, T tokens so far, M model width, H query heads, G groups, N batch x groups, h heads of
a group, S compressed blocks, n selected blocks per query, s gathered tokens, r stored rows, D key width, E value width,
p pairs of dimensions that rotary embeddings rotate together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from .attention import (
    CompressedBranch,
    NSAttention,
    SelectedBranch,
    SlidingBranch,
    TokenContext,
    VanillaAttention,
    selection_from,
    split_heads,
)
from .compression import split_into_blocks
from .config import Attention, Branch, Implementation, LayerConfig, NSAConfig
from .model import TinyLM
from .ops.dispatch import MissingImplementationError
from .ops.kernels import tiles
from .ops.kv_cache_attention import (
    block_probabilities,
    compressed_output,
    masked_attention,
    selected_block_indices,
    tokens_of_blocks,
)
from .ops.rotary import RotaryTable, rotate
from .ops.selection import Selection
from .paged_decode import PagedCache, append_to_pages
from .world import CannotRunError

MIN_CAPACITY = 64


class GrowingRows:
    """An append-only tensor of vectors, [B, G, count, D].

    Its storage doubles when it is full, so that each vector is copied only a few times.
    """

    def __init__(self) -> None:
        self.count = 0
        self._storage: Tensor | None = None  # None until the first vectors show dtype and device

    @property
    def capacity(self) -> int:
        """Return the number of vectors per sequence and group that fit into the current storage."""
        return 0 if self._storage is None else self._storage.shape[2]

    def add(self, fresh_BGCD: Tensor) -> None:
        """Append the vectors of C new tokens or blocks, for every sequence and group."""
        end = self.count + fresh_BGCD.shape[2]
        if self._storage is None or end > self.capacity:
            self._storage = self._enlarged_copy(fresh_BGCD, end)
        self._storage[:, :, self.count : end] = fresh_BGCD
        self.count = end

    def all(self) -> Tensor:
        """Return a view of all vectors added so far, [B, G, count, D]."""
        assert self._storage is not None, "something is added before anything is read"
        return self._storage[:, :, : self.count]

    def _enlarged_copy(self, like: Tensor, end: int) -> Tensor:
        batch, groups, _, width = like.shape
        storage = like.new_empty(batch, groups, _capacity(end), width)
        if self._storage is not None:
            storage[:, :, : self.count] = self.all()
        return storage


class RecentRows:
    """The keys or values of the latest tokens of a sequence, kept because later tokens still need them."""

    def __init__(self) -> None:
        self.vectors: Tensor | None = None  # [B, G, r, D]; None before the first call of `store`

    def concatenate(self, fresh_BGCD: Tensor) -> Tensor:
        """Return the stored vectors followed by `fresh_BGCD`. The stored vectors do not change."""
        return fresh_BGCD if self.vectors is None else torch.cat((self.vectors, fresh_BGCD), 2)

    def store(self, rows_BGCD: Tensor, start: int) -> None:
        """Replace the stored vectors with a copy of `rows_BGCD` from index `start` on."""
        self.vectors = rows_BGCD[:, :, start:].clone()  # a view would keep the memory of the whole prompt alive


class CompressedRows:
    """The compressed vectors of all complete blocks, and the tokens not yet compressed."""

    def __init__(self, config: NSAConfig) -> None:
        self.length, self.stride = config.block_len, config.block_stride
        self.compressed, self.pending = GrowingRows(), RecentRows()

    def add(self, fresh_BGCD: Tensor, compress: Callable[[Tensor], Tensor], cos_sin_2Tp: Tensor | None = None) -> None:
        """Append new tokens, and compress the blocks that they complete.

        `compress` maps tokens [B, G, T, D] to blocks [B, G, S, D]. If `cos_sin_2Tp` is given, each compressed vector is
        rotated to the position of its block's last token.
        """
        rows_BGCD = self.pending.concatenate(fresh_BGCD)
        blocks_BGSD = compress(rows_BGCD)
        if cos_sin_2Tp is not None:
            first_end = self.compressed.count * self.stride + self.length - 1
            blocks_BGSD = rotate(blocks_BGSD, cos_sin_2Tp[:, first_end :: self.stride][:, : blocks_BGSD.shape[2]])
        self.compressed.add(blocks_BGSD)
        self.pending.store(rows_BGCD, blocks_BGSD.shape[2] * self.stride)


class NSALayerCache:
    """The cached keys and values of one NSA layer. They stay empty for branches that the layer lacks."""

    def __init__(self, config: NSAConfig) -> None:
        self.cmp_k, self.cmp_v = CompressedRows(config), CompressedRows(config)
        self.sel_k, self.sel_v = GrowingRows(), GrowingRows()
        # Block means of the selected branch's keys, which rank its blocks if there is no compressed branch.
        self.means = CompressedRows(config)
        self.win_k, self.win_v = RecentRows(), RecentRows()


class VanillaLayerCache:
    """The cached keys and values of one layer with dense attention."""

    def __init__(self) -> None:
        self.k, self.v = GrowingRows(), GrowingRows()


class Cache:
    """The cached keys and values of all layers of a model, for one batch."""

    def __init__(self, config: NSAConfig) -> None:
        """Create an empty cache. Raise CannotRunError if the model uses PyTorch's own layers."""
        self.layers = [_layer_cache(config) for _ in range(config.layers)]
        self.tokens = 0
        self.batch: int | None = None  # number of sequences; None before the first token
        self.cos_sin = RotaryTable()


def _layer_cache(config: NSAConfig) -> NSALayerCache | VanillaLayerCache:
    if config.attention is Attention.STOCK:
        raise CannotRunError(
            f"shape {config.name}: attention stock is torch's own layer, which gives no keys to decode from; "
            "use attention nsa or vanilla"
        )
    return VanillaLayerCache() if config.attention is Attention.VANILLA else NSALayerCache(config)


def _capacity(end: int) -> int:
    return max(MIN_CAPACITY, 1 << (end - 1).bit_length())


# The most tokens of a chunk that are computed at once; larger pieces are not faster.
MAX_CHUNK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """The positions of new tokens in a sequence, with the rotary cosines and sines they need."""

    first: int
    end: int
    cos_sin: Tensor  # [2, end, D/2]

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions of the new tokens, shape [1, C]."""
        return torch.arange(self.first, self.end, device=self.cos_sin.device)[None]

    @property
    def is_whole_prompt(self) -> bool:
        """Whether there is more than one new token and the sequence starts with them."""
        return self.first == 0 and self.end > 1

    @property
    def own_cos_sin(self) -> Tensor:
        """Return the rotary cosines and sines of the new tokens, shape [2, C, p]."""
        return self.cos_sin[:, self.first : self.end]


def prefill(model: TinyLM, tokens_BT: Tensor) -> tuple[Tensor, Cache]:
    """Return the logits [B, T, vocab] of a prompt, and a cache that contains it.

    The prompt may have any length, also 0. `model` must not be wrapped (DDP, FSDP); any device and dtype works. Raises
    CannotRunError for attention stock.
    """
    cache = Cache(model.config)
    return step(model, tokens_BT, cache), cache


@torch.no_grad()
def step(model: TinyLM, tokens_BC: Tensor, cache: Cache | PagedCache) -> Tensor:
    """Append new tokens to the cache and return their logits, [B, C, vocab].

    Raises ValueError if the cache was filled with a different number of sequences, MissingImplementationError if the
    model's implementation cannot read this cache, and OutOfPagesError if a paged cache is full.
    """
    return model.head(model.norm(append_tokens(model, tokens_BC, cache)))


@torch.no_grad()
def next_logits(model: TinyLM, tokens: Tensor | Mapping[int, Tensor], cache: Cache | PagedCache) -> Tensor:
    """Append new tokens to the cache and return the logits of the last one, [B, vocab].

    `tokens` has the shape [B, C]. For a paged cache, `tokens` may also map sequence numbers to tokens [C], at least one
    per sequence; the logits are then in the order of the mapping. Raises the same errors as `step`.
    """
    if isinstance(tokens, Tensor):
        last_BM = append_tokens(model, tokens, cache)[:, -1]
    elif isinstance(cache, PagedCache):
        last_BM = torch.stack([x_CM[-1] for x_CM in append_to_pages(model, tokens, cache).values()])
    else:
        raise ValueError("tokens: only a paged cache takes a mapping of sequences; this cache takes a tensor [B, C]")
    return model.head(model.norm(last_BM))


@torch.no_grad()
def append_tokens(model: TinyLM, tokens_BC: Tensor, cache: Cache | PagedCache) -> Tensor:
    """Append new tokens to the cache and return the output of the last transformer block, [B, C, M]."""
    batch, count = tokens_BC.shape
    if cache.batch not in (None, batch):
        raise ValueError(f"tokens: {batch} sequences, but the cache has {cache.batch}; start a new one with prefill")
    if isinstance(cache, PagedCache):
        return torch.stack(list(append_to_pages(model, dict(enumerate(tokens_BC)), cache).values()))
    cache.batch = batch
    if count == 0:
        return model.embed(tokens_BC)
    if cache.tokens == 0:
        return _run_layers(model, tokens_BC, cache)
    elements = batch * _largest_intermediate(model.config, cache.tokens + count)
    pieces = [tokens_BC[:, start:stop] for start, stop in tiles(count, elements, MAX_CHUNK_TOKENS)]
    return torch.cat([_run_layers(model, piece, cache) for piece in pieces], 1)


def _largest_intermediate(config: NSAConfig, tokens: int) -> int:
    """Return the size of a layer's largest intermediate tensor, in elements per sequence and query."""
    if config.attention is Attention.VANILLA:
        return config.heads * tokens
    gathered_elements = config.groups * config.select_count * config.select_len * max(config.d_k, config.d_v)
    return max(gathered_elements, config.heads * (tokens // config.block_stride + config.window))


def _run_layers(model: TinyLM, tokens_BC: Tensor, cache: Cache) -> Tensor:
    end = cache.tokens + tokens_BC.shape[1]
    cos_sin = cache.cos_sin(model.get_buffer("frequencies"), end)[:, :end]
    new = NewTokens(first=cache.tokens, end=end, cos_sin=cos_sin)
    x_BCM = model.embed(tokens_BC)
    for block, layer_cache in zip(model.blocks, cache.layers, strict=True):
        x_BCM = x_BCM + attend_new_tokens(block.attn, block.attn_norm(x_BCM), layer_cache, new)
        x_BCM = x_BCM + block.mlp(block.mlp_norm(x_BCM))
    cache.tokens = end
    return x_BCM


def attend_new_tokens(
    layer: NSAttention | VanillaAttention, x_BCM: Tensor, cache: NSALayerCache | VanillaLayerCache, new: NewTokens
) -> Tensor:
    """Append the keys and values of new tokens to the cache, and return their attention output, [B, C, M]."""
    if isinstance(layer, VanillaAttention):
        assert isinstance(cache, VanillaLayerCache)
        return _vanilla(layer, x_BCM, cache, new)
    assert isinstance(cache, NSALayerCache)
    return _nsa(layer, x_BCM, cache, new)


def _vanilla(layer: VanillaAttention, x_BCM: Tensor, cache: VanillaLayerCache, new: NewTokens) -> Tensor:
    groups = layer.config.groups
    cache.k.add(rotate(split_heads(layer.k_proj(x_BCM), groups), new.own_cos_sin))
    cache.v.add(split_heads(layer.v_proj(x_BCM), groups))
    if new.is_whole_prompt:
        return layer(x_BCM, context=TokenContext(new.cos_sin))
    q_BHCD = rotate(split_heads(layer.q_proj(x_BCM), layer.config.heads), new.own_cos_sin)
    visible_CT = torch.arange(new.end, device=x_BCM.device) <= new.positions.t()
    output = functional.scaled_dot_product_attention(
        q_BHCD, cache.k.all(), cache.v.all(), attn_mask=visible_CT, enable_gqa=True
    )
    return layer.out_proj(output.transpose(1, 2).flatten(2))


def _nsa(layer: NSAttention, x_BCM: Tensor, cache: NSALayerCache, new: NewTokens) -> Tensor:
    branches = layer.config.branches
    if not new.is_whole_prompt and layer.implementation not in (Implementation.AUTO, Implementation.EAGER):
        raise MissingImplementationError(
            f"--impl {layer.implementation}: only plain torch reads a cache without pages; "
            "use --impl auto or eager, or --cache paged"
        )
    # A prompt computes these projections twice, once here and once in the layer's own forward pass. They take a small
    # part of its time.
    if Branch.CMP in branches:
        _cache_blocks(layer.cmp, x_BCM, cache, new)
    if Branch.SEL in branches:
        _cache_tokens(layer.sel, x_BCM, cache, new, ranked_by_own_means=Branch.CMP not in branches)
    window = _cache_window(layer.win, x_BCM, cache, new) if Branch.WIN in branches else None
    if new.is_whole_prompt:
        return layer(x_BCM, context=TokenContext(new.cos_sin))
    q_BHCD = rotate(split_heads(layer.q_proj(x_BCM), layer.config.heads), new.own_cos_sin)
    outputs = _attend_blocks(layer, q_BHCD, cache, new)
    if window is not None:
        outputs.append(_attend_window(layer.config, q_BHCD, window, new))
    return layer.mix(x_BCM, outputs)


def _cache_blocks(branch: CompressedBranch, x_BCM: Tensor, cache: NSALayerCache, new: NewTokens) -> None:
    groups = branch.config.groups
    cache.cmp_k.add(split_heads(branch.k_proj(x_BCM), groups), branch.k_blocks, new.cos_sin)
    cache.cmp_v.add(split_heads(branch.v_proj(x_BCM), groups), branch.v_blocks)


def _cache_tokens(
    branch: SelectedBranch, x_BCM: Tensor, cache: NSALayerCache, new: NewTokens, *, ranked_by_own_means: bool
) -> None:
    config = branch.config
    k_BGCD = split_heads(branch.k_proj(x_BCM), config.groups)
    if ranked_by_own_means:
        cache.means.add(
            k_BGCD, lambda k: split_into_blocks(k, config.block_len, config.block_stride).mean(3), new.cos_sin
        )
    cache.sel_k.add(rotate(k_BGCD, new.own_cos_sin))
    cache.sel_v.add(split_heads(branch.v_proj(x_BCM), config.groups))


def _cache_window(branch: SlidingBranch, x_BCM: Tensor, cache: NSALayerCache, new: NewTokens) -> tuple[Tensor, Tensor]:
    """Cache the keys and values of the new tokens, and return all keys and values in the window."""
    groups, window_rows = branch.config.groups, branch.config.window - 1
    k = cache.win_k.concatenate(rotate(split_heads(branch.k_proj(x_BCM), groups), new.own_cos_sin))
    v = cache.win_v.concatenate(split_heads(branch.v_proj(x_BCM), groups))
    for recent, rows in ((cache.win_k, k), (cache.win_v, v)):
        recent.store(rows, max(0, rows.shape[2] - window_rows))
    return k, v


def _attend_blocks(layer: NSAttention, q_BHCD: Tensor, cache: NSALayerCache, new: NewTokens) -> list[Tensor]:
    """Return the outputs of the compressed and selected branches, omitting a branch that the layer lacks."""
    config, outputs = layer.config, []
    if Branch.CMP not in config.branches and Branch.SEL not in config.branches:
        return []
    selection = selection_from(config)
    ranking_keys = cache.cmp_k if Branch.CMP in config.branches else cache.means
    k_NSD = ranking_keys.compressed.all().flatten(0, 1)
    probs_NShC = block_probabilities(_rows(q_BHCD, config.groups), k_NSD, new.positions, selection)
    if Branch.CMP in config.branches:
        outputs.append(_heads(compressed_output(probs_NShC, cache.cmp_v.compressed.all().flatten(0, 1)), config.groups))
    if Branch.SEL in config.branches:
        indices_NCn = selected_blocks(probs_NShC, new, selection)
        outputs.append(_attend_selected(config, q_BHCD, indices_NCn, cache, new))
    return outputs


def _attend_window(config: LayerConfig, q_BHCD: Tensor, window: tuple[Tensor, Tensor], new: NewTokens) -> Tensor:
    k_NSD, v_NSE = (rows.flatten(0, 1) for rows in window)
    keys = torch.arange(new.end - k_NSD.shape[1], new.end, device=k_NSD.device)
    queries_1C1 = new.positions[:, :, None]
    visible_1CS = (keys <= queries_1C1) & (keys > queries_1C1 - config.window)
    return _heads(
        masked_attention(_rows(q_BHCD, config.groups), k_NSD, v_NSE, visible_1CS, config.scale), config.groups
    )


def _attend_selected(
    config: LayerConfig, q_BHCD: Tensor, indices_NCn: Tensor, cache: NSALayerCache, new: NewTokens
) -> Tensor:
    tokens_NCs, visible_NCs = tokens_of_blocks(indices_NCn, new.positions, config.select_len)
    k_BGTD, v_BGTE = cache.sel_k.all(), cache.sel_v.all()
    batch, groups = k_BGTD.shape[:2]
    sequence = torch.arange(batch, device=q_BHCD.device)[:, None, None, None]
    group = torch.arange(groups, device=q_BHCD.device)[:, None, None]
    tokens_BGCs = tokens_NCs.unflatten(0, (batch, groups))
    k, v = (rows[sequence, group, tokens_BGCs].flatten(0, 2) for rows in (k_BGTD, v_BGTE))
    # Every query has its own keys, so each query becomes a batch entry with one token: [N*C, h, 1, D].
    q = _rows(q_BHCD, groups).transpose(1, 2).flatten(0, 1).unsqueeze(2)
    output = masked_attention(q, k, v, visible_NCs.flatten(0, 1)[:, None], config.scale)
    return _heads(output.squeeze(2).unflatten(0, (batch * groups, -1)).transpose(1, 2), groups)


def selected_blocks(probs_NShC: Tensor, new: NewTokens, selection: Selection) -> Tensor:
    """Return the indices of the blocks that each new token selects, shape [N, C, n or fewer]."""
    return selected_block_indices(probs_NShC, new.positions, -(-new.end // selection.select_len), selection)


def _rows(q_BHCD: Tensor, groups: int) -> Tensor:
    """Return the query heads grouped by the key head they share, shape [B*G, h, C, D]."""
    return q_BHCD.unflatten(1, (groups, -1)).flatten(0, 1)


def _heads(output_NhCE: Tensor, groups: int) -> Tensor:
    """Return the attention outputs, reshaped to have one dimension for all query heads, [B, H, C, E]."""
    return output_NhCE.unflatten(0, (-1, groups)).flatten(1, 2)
