"""The KV cache of one attention layer: what later tokens of a batch of sequences attend to.

`layer.new_cache` creates a cache, and `layer(x, cache=cache)` appends tokens to it. The outputs equal those of the
layer's parallel forward pass at the same positions. A cache has one block of memory per branch, or pages from a pool
(pages.py). Layers of a model can share the lengths and the pages of their sequences.

Dimensions: B sequences, C new tokens of a sequence, R = B x C, M model width, H query heads, G groups, S sequences of
the cache, n completed blocks of all sequences, l tokens of a block, r rows of a page, D key width, E value width, W
either of them, p pairs of dimensions that rotary embeddings rotate together.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from .config import Branch, LayerConfig
from .ops.cached_attention import CachedAttentionConfig, CachedRows, Kind, dense_output
from .ops.dispatch import count_run, example_tensors, implementation_for_cached
from .ops.kernels import tiles
from .ops.rotary import RotaryTable, rotary_frequencies, rotate, rotate_queries_and_keys
from .ops.selection import Selection
from .pages import PageTable, is_dense, pages_needed, rows_of
from .projections import TokenContext

if TYPE_CHECKING:
    from .attention import NSAttention
    from .vanilla_attention import VanillaAttention

Layer: TypeAlias = "NSAttention | VanillaAttention"
_KINDS = dict(zip(Branch, Kind, strict=True))
MIN_CAPACITY = 64
# The most tokens of a chunk that are computed at once. The memory of a window has room for as many new tokens.
MAX_CHUNK_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tokens that each layer appends in one call: C tokens to each of B sequences."""

    numbers: tuple[int, ...]  # numbers of the sequences
    firsts: tuple[int, ...]  # positions of their first new tokens
    count: int  # C
    config: LayerConfig
    cos_sin: Tensor  # [2, length of the longest sequence or more, p]
    table: Tensor | None  # page table [S, 3, columns]; None: the cache is not paged
    index: Tensor | slice  # selects these sequences from a tensor of all S sequences

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence of this step in tokens, including the new tokens."""
        return max(self.firsts) + self.count

    @property
    def is_prompt(self) -> bool:
        """Return whether there is more than one new token and all sequences start with them."""
        return self.count > 1 and not any(self.firsts)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Return the number of each token's sequence, [B, 1], and the token's position in it, [B, C]."""
        number_B1, first_B1 = torch.tensor([self.numbers, self.firsts], device=self.cos_sin.device)[..., None]
        return number_B1, first_B1 + torch.arange(self.count, device=self.cos_sin.device)

    @cached_property
    def rotary(self) -> Tensor:
        """Return the rotary cosines and sines of the new tokens, [2, R, p]."""
        return self.cos_sin[:, self.places[1].flatten()]

    @cached_property
    def completed(self) -> tuple[Tensor, Tensor] | None:
        """Return the sequence and the last token of each block that the new tokens complete, as indices, each [n].

        None means that no block is complete.
        """
        length, stride = self.config.block_len, self.config.block_stride
        ends = [
            (sequence, block * stride + length - 1 - first)
            for sequence, first in enumerate(self.firsts)
            for block in range(*(rows_of(self.config, Kind.BLOCKS, end) for end in (first, first + self.count)))
        ]
        if not ends:
            return None
        sequence_n, token_n = torch.tensor(ends, device=self.cos_sin.device).unbind(1)
        return sequence_n, token_n

    @cached_property
    def pieces(self) -> list[Step]:
        """Return the step as steps with small intermediate tensors."""
        config = self.config
        gathered = config.groups * config.select_count * config.select_len * max(config.d_k, config.d_v)
        scores = config.heads * (self.longest // config.block_stride + config.window)
        per_query = config.heads * self.longest if is_dense(config) else max(gathered, scores)
        return [
            replace(self, firsts=tuple(first + start for first in self.firsts), count=stop - start)
            for start, stop in tiles(self.count, len(self.numbers) * per_query, MAX_CHUNK_TOKENS)
        ]

    @cached_property
    def rows(self) -> CachedRows:
        """Return the rows of these sequences, for the memory of any layer."""
        return CachedRows(
            memory={},
            lengths=(self.places[1][:, -1] + 1).to(torch.int32),
            longest=self.longest,
            numbers=None if isinstance(self.index, slice) else self.index,
            tables=None if self.table is None else self.table[self.index],
            is_uniform=len(set(self.firsts)) == 1,
        )


class CachedSequences:
    """The lengths and pages of the sequences of a batch.

    Layers of a model share them, and each layer appends the same tokens: the first layer begins a step, and the other
    layers join it.
    """

    def __init__(self, config: LayerConfig, size: int, max_tokens: int | None, pages: PageTable | None) -> None:
        self.config, self.max_tokens, self.pages = config, max_tokens, pages
        self.lengths = [0] * size
        self.steps: list[int] = []  # finished steps of each layer
        self._cos_sin = RotaryTable()
        self._step: Step | None = None  # the latest step

    def reserve(self, counts: Mapping[int, int], prompts: Collection[int]) -> None:
        """Reserve room for new tokens; `counts` maps sequences to their number, `prompts` are as in PageTable.reserve.

        Raises ValueError if a sequence would be longer than `max_tokens`, and OutOfPagesError if too few pages are
        free.
        """
        growth = {number: (self.lengths[number], self.lengths[number] + count) for number, count in counts.items()}
        for number, (before, after) in growth.items():
            if self.max_tokens is not None and after > self.max_tokens:
                raise ValueError(
                    f"cache: sequence {number} has {before} tokens and gets {after - before} more, "
                    f"but max_tokens is {self.max_tokens}"
                )
        if self.pages is not None:
            self.pages.reserve(growth, prompts)

    def step(self, layer: int, numbers: tuple[int, ...], count: int, frequencies: Tensor) -> Step:
        """Return the step in which a layer appends `count` tokens to the sequences with these numbers."""
        if self.steps[layer] == max(self.steps):
            firsts = tuple(self.lengths[number] for number in numbers)
            self.reserve(dict.fromkeys(numbers, count), () if count == 1 or any(firsts) else numbers)
            is_whole_batch = numbers == tuple(range(len(self.lengths)))
            self._step = Step(
                numbers=numbers,
                firsts=firsts,
                count=count,
                config=self.config,
                cos_sin=self._cos_sin(frequencies, max(firsts) + count),
                table=None if self.pages is None else self.pages.on(frequencies.device),
                index=slice(None) if is_whole_batch else torch.tensor(numbers, device=frequencies.device),
            )
        step = self._step
        is_joined = step is not None and (step.numbers, step.count) == (numbers, count)
        if step is None or not is_joined or self.steps[layer] < max(self.steps) - 1:
            raise ValueError(
                "cache: layers that share sequences must append the same tokens, each layer once; this layer has "
                f"appended {self.steps[layer]} times and another one {max(self.steps)} times"
            )
        return step

    def finish(self, layer: int, step: Step) -> None:
        """Note that a layer has appended the tokens of a step."""
        if self.steps[layer] == max(self.steps):
            for number in step.numbers:
                self.lengths[number] += step.count
        self.steps[layer] += 1


class KVCache:
    """The cached keys and values of one attention layer, for a batch of sequences. `layer.new_cache` creates it."""

    def __init__(self, config: LayerConfig, sequences: CachedSequences, frequencies: Tensor | None) -> None:
        self.config, self.sequences, self.frequencies = config, sequences, frequencies
        self.numbers = tuple(range(len(sequences.lengths)))
        self.layer = len(sequences.steps)  # number of the layer among those that share the sequences
        sequences.steps.append(0)
        # Keys [pages, G, r, D] and values [pages, G, r, E]. Without a page table, a sequence has one page per kind, and
        # row i is row i % r of it. All kinds of a paged cache have the same pages.
        self.rows: dict[Kind, tuple[Tensor, Tensor]] = {}
        self._owner: list[weakref.ref[nn.Module]] = []  # the layer, once it has used the cache or a view of it
        self.recent: list[Tensor] = []  # the last l - 1 uncompressed keys and values, [S, l - 1, G, W], oldest first

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens in each sequence."""
        return [self.sequences.lengths[number] for number in self.numbers]

    @property
    def free_pages(self) -> int:
        """Return the number of free pages, 0 for a cache without pages."""
        return 0 if self.sequences.pages is None else self.sequences.pages.free

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_owner": []}  # a copy or a pickle of the cache is for a copy of its layer

    def bind_to(self, layer: nn.Module) -> None:
        """Make `layer` the only layer that may use the cache. Raise ValueError if another layer has used it."""
        if not self._owner:
            self._owner.append(weakref.ref(layer))
        if self._owner[0]() is not layer:
            raise ValueError("cache: it belongs to another layer; create one for each layer with its new_cache")

    def select(self, numbers: Sequence[int]) -> KVCache:
        """Return a view of the cache that contains only the sequences with these numbers.

        Raises ValueError for numbers of no sequence, and if one occurs twice or there is none.
        """
        unknown = sorted(set(numbers) - set(range(len(self.sequences.lengths))))
        if unknown or len(set(numbers)) < len(numbers) or not numbers:
            raise ValueError(
                f"sequences: expected different numbers from 0 to {len(self.sequences.lengths) - 1}, "
                f"got {', '.join(map(str, unknown or numbers)) or 'none'}"
            )
        view = copy.copy(self)
        view.numbers, view._owner = tuple(numbers), self._owner
        return view

    def end(self, sequence: int) -> None:
        """End a sequence in all layers that share it, and free its pages. Its number can start a new sequence."""
        (sequence,) = self.select([sequence]).numbers
        self.sequences.lengths[sequence] = 0
        if self.sequences.pages is not None:
            self.sequences.pages.end(sequence)

    def append(self, step: Step, fresh: Mapping[Kind, tuple[Tensor, Tensor]], layer: Layer) -> None:
        """Append the keys [1, G, R, D] and values [1, G, R, E] of new tokens. Those of BLOCKS are not yet rotated."""
        sizes = len(step.numbers), step.count
        for kind, pair in fresh.items():
            pair_BCGW = [rows[0].transpose(0, 1).unflatten(0, sizes) for rows in pair]
            self._make_room(kind, step, pair[0])
            if kind is Kind.BLOCKS:
                self._append_blocks(step, pair_BCGW, layer)
                continue
            # Only the window of the last token of a prompt is read later.
            start = max(0, step.count + 1 - step.config.window) if kind is Kind.WINDOW and step.is_prompt else 0
            number_B1, position_BC = step.places
            self._write(kind, step, number_B1, position_BC[:, start:], [rows[:, start:] for rows in pair_BCGW])

    def _append_blocks(self, step: Step, pair_BCGW: list[Tensor], layer: Layer) -> None:
        """Write the blocks that the new tokens complete, and keep the tokens that later blocks contain."""
        length, stride = step.config.block_len, step.config.block_stride
        if not self.recent:
            memory = _zeros(step.config, len(self.sequences.lengths), length - 1, pair_BCGW[0])
            self.recent += [rows.transpose(1, 2) for rows in memory]
        known = [torch.cat((old[step.index], rows), 1) for old, rows in zip(self.recent, pair_BCGW, strict=True)]
        for old, rows in zip(self.recent, known, strict=True):
            old[step.index] = rows[:, step.count :]
        if step.completed is None:
            return
        sequence_n, token_n = step.completed
        # Of l tokens, those that end with token i of the step begin at row i of `known`.
        blocks = [rows.unfold(1, length, 1)[sequence_n, token_n].transpose(2, 3).unsqueeze(2) for rows in known]
        k_nG1D, v_nG1E = _compress(layer, *blocks)
        angles_2np = step.rotary[:, sequence_n * step.count + token_n]
        k_nGD = rotate(k_nG1D.permute(2, 1, 0, 3), angles_2np, layer.implementation)[0].transpose(0, 1)
        number_B1, position_BC = step.places
        block_n = (position_BC[sequence_n, token_n] + 1 - length) // stride
        self._write(Kind.BLOCKS, step, number_B1[sequence_n, 0], block_n, [k_nGD, v_nG1E[:, :, 0]])

    def _write(self, kind: Kind, step: Step, number: Tensor, row: Tensor, pair: list[Tensor]) -> None:
        """Write keys [..., G, D] and values [..., G, E] to the rows [...] of the sequences."""
        page_size = self.rows[kind][0].shape[2]
        page = number if step.table is None else step.table[number, int(kind), row // page_size].long()
        for memory, fresh in zip(self.rows[kind], pair, strict=True):
            memory[page, :, row % page_size] = fresh

    def _make_room(self, kind: Kind, step: Step, like: Tensor) -> None:
        """Allocate or enlarge the memory for a kind of rows, with the dtype and device of `like`."""
        config, table, limit = step.config, self.sequences.pages, self.sequences.max_tokens
        if table is not None:
            if not self.rows:
                self.rows |= dict.fromkeys(Kind, _zeros(config, table.pages, table.page_size, like))
            return

        def rows_in_use(tokens: int) -> int:
            rows = rows_of(config, kind, tokens)
            return min(rows, config.window - 1 + MAX_CHUNK_TOKENS) if kind is Kind.WINDOW else rows

        needed, old = rows_in_use(step.longest), self.rows.get(kind)
        if old is None or needed > old[0].shape[2]:
            capacity = max(MIN_CAPACITY, 1 << max(0, needed - 1).bit_length()) if limit is None else rows_in_use(limit)
            self.rows[kind] = _zeros(config, len(self.sequences.lengths), capacity, like)
            for memory, rows in zip(self.rows[kind], old or (), strict=False):
                memory[:, :, : rows.shape[2]] = rows


def _zeros(config: LayerConfig, pages: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for keys [pages, G, rows, D] and values [pages, G, rows, E]."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be written in other modes
        keys, values = (
            torch.zeros(pages, config.groups, rows, width, dtype=like.dtype, device=like.device)
            for width in (config.d_k, config.d_v)
        )
    return keys, values


def new_cache(
    config: LayerConfig,
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    shared_with: KVCache | None = None,
    frequencies: Tensor | None = None,
) -> KVCache:
    """Return an empty cache for a layer with this configuration, as described at `NSAttention.new_cache`."""
    if shared_with is not None:
        if {batch_size, max_tokens, page_size, pages} != {None}:
            raise ValueError("new_cache: with shared_with, the other cache decides the number of sequences and pages")
        if any(shared_with.sequences.steps) or _geometry(shared_with.config) != _geometry(config):
            raise ValueError(
                "new_cache: shared_with must be an empty cache of a layer with the same lengths, in tokens"
            )
        return KVCache(config, shared_with.sequences, frequencies)
    if batch_size is None:
        raise ValueError("batch_size: expected the number of sequences, or shared_with")
    options = {"batch_size": batch_size, "max_tokens": max_tokens, "page_size": page_size, "pages": pages}
    mistakes = [
        f"{name}: expected at least 1, got {value}"
        for name, value in options.items()
        if value is not None and value < 1
    ]
    if mistakes:
        raise ValueError("; ".join(mistakes))
    table = None
    if page_size is not None or pages is not None:
        if pages is None and max_tokens is None:
            raise ValueError("pages: expected the number of pages of the pool, or max_tokens for each sequence")
        pool = pages or batch_size * pages_needed(config, max_tokens or 0, page_size, later_chunks=True)
        table = PageTable(config, batch_size, pool, page_size)
    return KVCache(config, CachedSequences(config, batch_size, max_tokens, table), frequencies)


def _geometry(config: LayerConfig) -> tuple[object, ...]:
    return (
        replace(Selection.of(config), scale=1.0),
        config.window,
        config.branches,
        config.rope_base,
        is_dense(config),
    )


def attend_with_cache(layer: Layer, x_BCM: Tensor, cache: KVCache) -> Tensor:
    """Append new tokens to a cache, and return their output [B, C, M].

    Raises ValueError for tokens that do not suit the cache, OutOfPagesError if too few pages are free, and
    MissingImplementationError if the layer's implementation cannot read the cache. No token is then appended.
    """
    _check(layer, x_BCM, cache)
    count, frequencies = x_BCM.shape[1], cache.frequencies
    if not count:
        return x_BCM
    cache.bind_to(layer)
    if frequencies is None:
        dtype = torch.promote_types(x_BCM.dtype, torch.float32)
        frequencies = rotary_frequencies(layer.config.d_k, layer.config.rope_base, x_BCM.device).to(dtype)
    step = cache.sequences.step(cache.layer, cache.numbers, count, frequencies)
    if step.is_prompt:
        # A prompt computes the projections twice, once here and once in the layer's own forward pass. They take a small
        # part of its time.
        cache.append(step, _project(layer, x_BCM, step)[1], layer)
        output = layer.forward(x_BCM, context=TokenContext(step.cos_sin[:, :count]))
    else:
        pieces = zip(step.pieces, x_BCM.split([piece.count for piece in step.pieces], 1), strict=True)
        output = torch.cat([_attend(layer, x, cache, piece) for piece, x in pieces], 1)
    cache.sequences.finish(cache.layer, step)
    return output


def _check(layer: Layer, x_BCM: Tensor, cache: KVCache) -> None:
    """Raise ValueError if a layer cannot append these tokens to a cache."""
    shape, shape_of_cache = ((_geometry(c), c.groups, c.d_k, c.d_v) for c in (layer.config, cache.config))
    if shape != shape_of_cache:
        raise ValueError("cache: it is of a layer with another shape; create it with this layer's new_cache")
    if x_BCM.shape[0] != len(cache.numbers):
        raise ValueError(
            f"x: {x_BCM.shape[0]} sequences, but the cache has {len(cache.numbers)}; "
            "select some of them with cache.select"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_BCM, *layer.parameters())):
        raise ValueError(
            "cache: cached keys and values have no gradients; call the layer under torch.no_grad() or "
            "torch.inference_mode(), or without a cache"
        )
    own, kind = next(iter(cache.rows.values()), (x_BCM,))[0], x_BCM.device.type
    if own is not x_BCM and own.device == x_BCM.device and torch.is_autocast_enabled(kind):
        x_BCM = x_BCM.to(torch.get_autocast_dtype(kind))
    if (own.dtype, own.device) != (x_BCM.dtype, x_BCM.device):
        raise ValueError(f"x: {x_BCM.dtype} on {x_BCM.device}, but the cache contains {own.dtype} on {own.device}")


def _attend(layer: Layer, x_BCM: Tensor, cache: KVCache, step: Step) -> Tensor:
    """Append the tokens of a step, and return their output [B, C, M], computed from the cache."""
    config = layer.config
    q_1HRD, fresh = _project(layer, x_BCM, step)
    if is_dense(config):
        cache.append(step, fresh, layer)
        output_1RHE = dense_output(q_1HRD, replace(step.rows, memory=cache.rows), config.scale).transpose(1, 2)
    else:
        layer = cast("NSAttention", layer)
        examples, is_paged = example_tensors(config, q_1HRD.device, q_1HRD.dtype), step.table is not None
        attend, used = implementation_for_cached(layer.implementation, examples, is_paged=is_paged)
        count_run(layer.gate_mlp.runs, used)
        cache.append(step, fresh, layer)
        options = CachedAttentionConfig(selection=Selection.of(config), window=config.window, branches=config.branches)
        gates_c1HR = layer.gates(x_BCM.flatten(0, 1)[None])
        output_1RHE = attend(q_1HRD, gates_c1HR, replace(step.rows, memory=cache.rows), options)
    return layer.out_proj(output_1RHE.flatten(2)).view(x_BCM.shape)


def _project(layer: Layer, x_BCM: Tensor, step: Step) -> tuple[Tensor, dict[Kind, tuple[Tensor, Tensor]]]:
    """Return the rotated queries [1, H, R, D], and the keys and values [1, G, R, *] of each kind of rows.

    The keys of blocks are not rotated.
    """
    x_1RM = x_BCM.flatten(0, 1)[None]
    q_1HRD, raw = layer.project(x_1RM)
    pairs = {_KINDS[branch]: (keys, values) for branch, (keys, values, _) in raw.items()}
    if Branch.SEL in raw and not is_dense(layer.config):
        # Without a compressed branch, means of the selected branch's keys rank the blocks.
        pairs = {Kind.BLOCKS: pairs.get(Kind.BLOCKS) or pairs[Kind.TOKENS], **pairs}
    kinds = [kind for kind in pairs if kind is not Kind.BLOCKS]
    tables = [step.rotary] * (1 + len(kinds))
    q_1HRD, *keys = rotate_queries_and_keys(q_1HRD, [pairs[kind][0] for kind in kinds], tables, layer.implementation)
    for kind, k_1GRD in zip(kinds, keys, strict=True):
        pairs[kind] = k_1GRD, pairs[kind][1]
    return q_1HRD, pairs


def _compress(layer: Layer, k_nG1lD: Tensor, v_nG1lE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the compressed keys [n, G, 1, D] and values [n, G, 1, E] of blocks."""
    if Branch.CMP in layer.config.branches:
        return layer.cmp.k_blocks.compress(k_nG1lD), layer.cmp.v_blocks.compress(v_nG1lE)
    return k_nG1lD.mean(3), v_nG1lE.mean(3)
