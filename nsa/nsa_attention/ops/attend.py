"""The attention branches in plain PyTorch, one tile of queries at a time, for any device.

Memory grows linearly with the sequence length. A `Pattern` defines which keys a query attends to: the mask bias of a
tile is 0 for these keys and -inf for others. Attention under a pattern is one registered torch operator, so autograd
has one node and torch.compile one call for any sequence length. Operators accept only numbers, strings and tensors, so
patterns and kernels are passed by name.

Dimensions: B batch, H query heads, G groups, N batch x groups, h heads of a group, T queries, C queries of a tile, S
keys, D key width, E value width, b selection blocks, n selected blocks per query, X columns of an index table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from . import NAMESPACE
from .autograd import register_attention_gradients
from .blockwise import blockwise
from .cpu_threads import run_in_threads, split_work
from .kernels import (
    KERNELS,
    BlockwiseKernel,
    Kernel,
    TileState,
    autocast_disabled,
    compute_dtype,
    fully_masked_output,
    tiles,
)
from .packed import compressed_starts, selection_starts, sequence_numbers

_MASKED = -torch.inf


class Pattern(Protocol):
    """A rule that defines which keys each query attends to.

    `indices` [N, T, X] are the selected blocks, or the spans of keys for packed sequences. A tile contains the queries
    from `start` to `stop` - 1.
    """

    def max_tile_queries(self) -> int:
        """Return the largest useful number of queries per tile. Larger tiles would compute too many masked scores."""

    def key_range(self, start: int, stop: int, indices: Tensor | None = None) -> tuple[int, int]:
        """Return a range that contains every key to which the queries from `start` to `stop` - 1 attend."""

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        """Return the mask bias of a tile: 0 for keys that a query attends to, -inf for others.

        It broadcasts to [N, 1, C, S] and has the dtype and device of `like`.
        """

    def fully_masked_rows(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor | None:
        """Return a mask of the queries that attend to no key, or None if there are no such queries."""


@dataclass(frozen=True)
class CompletedBlocks:
    """The mask of attention to compressed blocks: each query attends to the blocks complete at its position."""

    block_len: int
    block_stride: int

    def count(self, tokens: int) -> int:
        """Return the number of blocks that are complete after `tokens` tokens."""
        return max(0, (tokens - self.block_len) // self.block_stride + 1)

    def max_tile_queries(self) -> int:
        return 512

    def key_range(self, _start: int, stop: int, _indices: Tensor | None = None) -> tuple[int, int]:
        return 0, self.count(stop)

    def bias(self, start: int, stop: int, _indices: Tensor | None, like: Tensor) -> Tensor:
        return _mask_bias(self.visible(start, stop, like.device), like)

    def visible(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return a mask of the blocks that each query from `start` to `stop` - 1 attends to, bool [C, S]."""
        queries = torch.arange(start, stop, device=device)
        last_tokens = torch.arange(self.count(stop), device=device) * self.block_stride + self.block_len - 1
        return last_tokens <= queries[:, None]

    def fully_masked_rows(self, start: int, stop: int, _indices: Tensor | None, device: torch.device) -> Tensor | None:
        first_sighted = self.block_len - 1
        return None if start >= first_sighted else torch.arange(start, stop, device=device) < first_sighted


@dataclass(frozen=True)
class LastTokens:
    """The mask of sliding-window attention: query t attends to the keys in (t - w, t]."""

    window: int

    def max_tile_queries(self) -> int:
        # A tile of C queries reads w + C - 1 keys, and each query attends to w of them.
        return max(64, self.window // 8)

    def key_range(self, start: int, stop: int, _indices: Tensor | None = None) -> tuple[int, int]:
        return max(0, start - self.window + 1), stop

    def bias(self, start: int, stop: int, _indices: Tensor | None, like: Tensor) -> Tensor:
        first, _ = self.key_range(start, stop)
        return _window_bias(self.window, start - first, stop - start, like.dtype, like.device)

    def fully_masked_rows(
        self, _start: int, _stop: int, _indices: Tensor | None, _device: torch.device
    ) -> Tensor | None:
        return None


@dataclass(frozen=True)
class SelectedBlocks:
    """The mask of attention to selected blocks: a query attends to their tokens, up to its own position.

    An index of -1 means no block.
    """

    select_len: int

    def max_tile_queries(self) -> int:
        return 256

    def key_range(self, _start: int, stop: int, _indices: Tensor | None = None) -> tuple[int, int]:
        return 0, stop

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        index_NCn = _index_rows(indices, start, stop)
        blocks = -(-stop // self.select_len)
        # Empty slots and blocks after this tile write to an extra column. A block selected twice writes 0 twice.
        columns = torch.where((index_NCn < 0) | (index_NCn >= blocks), blocks, index_NCn)
        of_block = like.new_full((*columns.shape[:2], blocks + 1), _MASKED).scatter_(2, columns, 0.0)
        of_token = of_block[..., :blocks].repeat_interleave(self.select_len, dim=2)[..., :stop]
        # A key can be later than its query only among the tile's own tokens.
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=like.device).triu_(1)
        of_token[..., start:].masked_fill_(later, _MASKED)
        return of_token.unsqueeze(1)

    def fully_masked_rows(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor | None:
        index_NCn = _index_rows(indices, start, stop)
        current = torch.arange(start, stop, device=device)[:, None] // self.select_len
        return ~((index_NCn >= 0) & (index_NCn <= current)).any(-1).unsqueeze(1)


@dataclass(frozen=True)
class KeySpans:
    """A mask for packed sequences: each query attends to one contiguous span of keys.

    The two columns of `indices` are the first key of a query and the key after its last. Neither column may decrease
    from one query to the next.
    """

    def max_tile_queries(self) -> int:
        return 256

    def key_range(self, start: int, stop: int, indices: Tensor | None = None) -> tuple[int, int]:
        row_TX = _index_rows(indices, start, stop)[0]
        first, last = int(row_TX[0, 0]), int(row_TX[-1, 1])
        return first, max(first, last)

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        first_C1, stop_C1 = _index_rows(indices, start, stop)[0].split(1, 1)
        keys = torch.arange(*self.key_range(start, stop, indices), device=like.device)
        return _mask_bias((keys >= first_C1) & (keys < stop_C1), like)

    def fully_masked_rows(self, start: int, stop: int, indices: Tensor | None, _device: torch.device) -> Tensor | None:
        row_TX = _index_rows(indices, start, stop)[0]
        return row_TX[:, 0] >= row_TX[:, 1]


@dataclass(frozen=True)
class PackedSelectedBlocks:
    """The mask of attention to selected blocks, for packed sequences.

    Blocks are numbered along the row, and none spans two sequences. Columns 0 and 1 of `indices` are the first token of
    the query's sequence and the block of the query. The selected blocks follow.
    """

    def max_tile_queries(self) -> int:
        return 256

    def key_range(self, start: int, stop: int, indices: Tensor | None = None) -> tuple[int, int]:
        return int(_index_rows(indices, start, start + 1)[0, 0, 0]), stop

    def bias(self, start: int, stop: int, indices: Tensor | None, like: Tensor) -> Tensor:
        first, _ = self.key_range(start, stop, indices)
        block_S = _index_rows(indices, first, stop)[0, :, 1]
        index_NCn = _index_rows(indices, start, stop)[..., 2:] - block_S[0]
        blocks = int(block_S[-1] - block_S[0]) + 1
        columns = torch.where((index_NCn < 0) | (index_NCn >= blocks), blocks, index_NCn)
        of_block = like.new_full((*columns.shape[:2], blocks + 1), _MASKED).scatter_(2, columns, 0.0)
        of_token = of_block.index_select(2, block_S - block_S[0])
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=like.device).triu_(1)
        of_token[..., start - first :].masked_fill_(later, _MASKED)
        return of_token.unsqueeze(1)

    def fully_masked_rows(self, start: int, stop: int, indices: Tensor | None, _device: torch.device) -> Tensor | None:
        row_NCX = _index_rows(indices, start, stop)
        index_NCn, current_NC1 = row_NCX[..., 2:], row_NCX[..., 1:2]
        return ~((index_NCn >= 0) & (index_NCn <= current_NC1)).any(-1).unsqueeze(1)


PATTERNS: dict[str, Callable[..., Pattern]] = {
    "compressed": CompletedBlocks,
    "sliding": LastTokens,
    "selected": SelectedBlocks,
    "spans": KeySpans,
    "selected_of_packed": PackedSelectedBlocks,
}


@lru_cache(maxsize=64)
def _window_bias(window: int, before: int, queries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask of one tile for a sliding window. `before` keys come before the first query."""
    # All tiles of a sequence have the same bias, except the first and the last tiles.
    with torch.inference_mode(mode=False):  # the cached tensor must also be usable outside of inference mode
        query_C1 = torch.arange(before, before + queries, device=device)[:, None]
        key_S = torch.arange(before + queries, device=device)
        return _mask_bias(
            (key_S <= query_C1) & (key_S > query_C1 - window), torch.empty((), dtype=dtype, device=device)
        )


def _index_rows(indices: Tensor | None, start: int, stop: int) -> Tensor:
    assert indices is not None, "the selected branch always has indices"
    return indices[:, start:stop].long()


def _mask_bias(seen_CS: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(seen_CS.shape).masked_fill_(~seen_CS, _MASKED)[None, None]


def compressed_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    block_len: int,
    block_stride: int,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to compressed blocks.

    A query before the end of the first block gets the output 0 and the log-sum-exp -inf.
    """
    lengths = [block_len, block_stride]
    return attend(q_BHTD, k_BGSD, v_BGSE, pattern="compressed", lengths=lengths, kernel=kernel, scale=scale)


def selected_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    *,
    select_len: int,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to the selected blocks.

    A query whose indices are all -1 gets the output 0 and the log-sum-exp -inf. The work of the blockwise kernel grows
    with T; the other kernels compute the scores of all keys and mask them, so their work grows with T squared.
    """
    if kernel.name == BlockwiseKernel.name:
        return blockwise(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, select_len=select_len, scale=scale)
    return attend(
        q_BHTD,
        k_BGTD,
        v_BGTE,
        pattern="selected",
        lengths=[select_len],
        kernel=kernel,
        scale=scale,
        indices_BGTn=indices_BGTn,
    )


def sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of sliding-window attention."""
    return attend(q_BHTD, k_BGTD, v_BGTE, pattern="sliding", lengths=[window], kernel=kernel, scale=scale)


def packed_compressed_attention(
    q_1HTD: Tensor,
    k_1GSD: Tensor,
    v_1GSE: Tensor,
    *,
    block_len: int,
    block_stride: int,
    scale: float,
    kernel: Kernel,
    starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the result of `compressed_attention` for packed sequences."""
    row = _TokenPositions.of(starts, q_1HTD.shape[2])
    first_T = compressed_starts(starts, block_len, block_stride)[row.sequence_T]
    count_T = torch.div(row.position_T + 1 - block_len, block_stride, rounding_mode="floor") + 1
    return _attend_to_spans(q_1HTD, k_1GSD, v_1GSE, first_T, first_T + count_T.clamp_min(0), kernel, scale)


def packed_sliding_attention(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, *, window: int, scale: float, kernel: Kernel, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result of `sliding_attention` for packed sequences."""
    row = _TokenPositions.of(starts, q_1HTD.shape[2])
    token_T = row.begin_T + row.position_T
    window = min(window, q_1HTD.shape[2])  # `starts` may be int32, which cannot represent larger windows
    first_T = torch.maximum(row.begin_T, token_T - window + 1)
    return _attend_to_spans(q_1HTD, k_1GTD, v_1GTE, first_T, token_T + 1, kernel, scale)


def _attend_to_spans(
    q_1HTD: Tensor, k_1GSD: Tensor, v_1GSE: Tensor, first_T: Tensor, stop_T: Tensor, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of attention in which each query sees the keys `first_T` to `stop_T` - 1."""
    indices = _for_every_group(torch.stack((first_T, stop_T), 1), k_1GSD)
    return attend(q_1HTD, k_1GSD, v_1GSE, pattern="spans", lengths=[], kernel=kernel, scale=scale, indices_BGTn=indices)


def packed_selected_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTE: Tensor,
    indices_1GTn: Tensor,
    *,
    select_len: int,
    scale: float,
    kernel: Kernel,
    starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the result of `selected_attention` for packed sequences.

    The indices count blocks from the start of each query's own sequence.
    """
    row = _TokenPositions.of(starts, q_1HTD.shape[2])
    first_T = selection_starts(starts, select_len)[row.sequence_T]
    token_columns_T2 = torch.stack((row.begin_T, first_T + row.position_T // select_len), 1)
    row_indices = torch.where(indices_1GTn < 0, -1, indices_1GTn + first_T[:, None])
    table = torch.cat((_for_every_group(token_columns_T2, k_1GTD).to(row_indices.dtype), row_indices), -1)
    return attend(
        q_1HTD, k_1GTD, v_1GTE, pattern="selected_of_packed", lengths=[], kernel=kernel, scale=scale, indices_BGTn=table
    )


@dataclass(frozen=True, kw_only=True)
class _TokenPositions:
    """The sequence to which each token of a packed row belongs, and the token's position in that sequence."""

    sequence_T: Tensor  # number of the token's sequence
    begin_T: Tensor  # first token of that sequence
    position_T: Tensor  # position of the token in its sequence

    @classmethod
    def of(cls, starts: Tensor, tokens: int) -> _TokenPositions:
        sequence_T = sequence_numbers(starts, tokens)
        begin_T = starts[sequence_T]
        place_T = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
        return cls(sequence_T=sequence_T, begin_T=begin_T, position_T=place_T - begin_T)


def _for_every_group(row_TX: Tensor, k_1GSD: Tensor) -> Tensor:
    return row_TX[None, None].expand(1, k_1GSD.shape[1], -1, -1)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    pattern: str,
    lengths: list[int],
    kernel: Kernel,
    scale: float,
    indices_BGTn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention under a mask pattern.

    `pattern` is a key of PATTERNS, and `lengths` are the constructor arguments of that pattern. The log-sum-exp has no
    gradient.
    """
    batch, heads, queries, _ = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    indices = None if indices_BGTn is None else indices_BGTn.reshape(rows, queries, indices_BGTn.shape[3])
    o_NhTE, lse_NhT = _attend(
        q_BHTD.reshape(rows, heads // groups, queries, q_BHTD.shape[3]),
        k_BGSD.reshape(rows, *k_BGSD.shape[2:]),
        v_BGSE.reshape(rows, *v_BGSE.shape[2:]),
        indices,
        pattern,
        lengths,
        kernel.name,
        scale,
    )
    return o_NhTE.reshape(batch, heads, queries, v_BGSE.shape[3]), lse_NhT.reshape(batch, heads, queries)


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def _attend(
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    pattern: str,
    lengths: list[int],
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rule, tile_kernel = PATTERNS[pattern](*lengths), KERNELS[kernel]
    o_NhTE, lse_NhT = fully_masked_output(q_NhTD, v_NSE)

    def piece(rows: slice, heads: slice) -> None:
        tensors = (q_NhTD[rows, heads], k_NSD[rows], v_NSE[rows], None if indices is None else indices[rows])
        _attend_tiles(rule, tile_kernel, *tensors, o_NhTE[rows, heads], lse_NhT[rows, heads], scale)

    run_in_threads([partial(piece, *share) for share in split_work(q_NhTD.device, *q_NhTD.shape[:2])])
    return o_NhTE, lse_NhT


def _attend_tiles(
    rule: Pattern,
    tile_kernel: Kernel,
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    scale: float,
) -> None:
    """Write the output and log-sum-exp of attention tile by tile. Do not write the rows of queries without keys."""
    with autocast_disabled(q_NhTD):
        for start, stop in _tiles(q_NhTD, rule, tile_kernel, indices):
            first, last = rule.key_range(start, stop, indices)
            if first == last:
                continue
            q, o, lse = (tensor[:, :, start:stop] for tensor in (q_NhTD, o_NhTE, lse_NhT))
            bias = rule.bias(start, stop, indices, q_NhTD)
            o[:], lse[:] = tile_kernel.forward(q, k_NSD[:, first:last], v_NSE[:, first:last], bias, scale)
            fully_masked = rule.fully_masked_rows(start, stop, indices, q_NhTD.device)
            if fully_masked is not None:
                lse.masked_fill_(fully_masked, -torch.inf)


@torch.library.custom_op(f"{NAMESPACE}::attend_backward", mutates_args=())
def _attend_backward(
    grad_NhTE: Tensor,
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    pattern: str,
    lengths: list[int],
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rule, tile_kernel = PATTERNS[pattern](*lengths), KERNELS[kernel]
    dq = torch.zeros_like(q_NhTD, memory_format=torch.contiguous_format)
    dk = k_NSD.new_zeros(k_NSD.shape, dtype=compute_dtype(k_NSD))
    dv = v_NSE.new_zeros(v_NSE.shape, dtype=compute_dtype(v_NSE))

    def piece(rows: slice, heads: slice) -> tuple[Tensor, Tensor]:
        grad, q, o, lse = (tensor[rows, heads] for tensor in (grad_NhTE, q_NhTD, o_NhTE, lse_NhT))
        row_indices = None if indices is None else indices[rows]
        return _differentiate_tiles(
            rule, tile_kernel, grad, q, o, lse, k_NSD[rows], v_NSE[rows], row_indices, dq[rows, heads], scale
        )

    cut = split_work(q_NhTD.device, *q_NhTD.shape[:2])
    # Add in the order of the pieces, not of their completion, so that the sum is reproducible.
    for (rows, _), (piece_dk, piece_dv) in zip(
        cut, run_in_threads([partial(piece, *share) for share in cut]), strict=True
    ):
        dk[rows] += piece_dk
        dv[rows] += piece_dv
    # An operator must not return its inputs or views of them. `to` may return `dk` itself, which is a new tensor.
    return dq, dk.to(k_NSD.dtype), dv.to(v_NSE.dtype)


def _differentiate_tiles(
    rule: Pattern,
    tile_kernel: Kernel,
    grad_NhTE: Tensor,
    q_NhTD: Tensor,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    dq_NhTD: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values, and write the gradient of the queries to `dq_NhTD`."""
    dk = k_NSD.new_zeros(k_NSD.shape, dtype=compute_dtype(k_NSD))
    dv = v_NSE.new_zeros(v_NSE.shape, dtype=compute_dtype(v_NSE))
    with autocast_disabled(q_NhTD):
        for start, stop in _tiles(q_NhTD, rule, tile_kernel, indices):
            first, last = rule.key_range(start, stop, indices)
            if first == last:
                continue
            q, o, lse, grad = (tensor[:, :, start:stop] for tensor in (q_NhTD, o_NhTE, lse_NhT, grad_NhTE))
            state = TileState(q=q, k=k_NSD[:, first:last], v=v_NSE[:, first:last], output=o, lse=lse)
            bias = rule.bias(start, stop, indices, q_NhTD)
            dq_NhTD[:, :, start:stop], tile_dk, tile_dv = tile_kernel.backward(grad, state, bias, scale)
            dk[:, first:last] += tile_dk
            dv[:, first:last] += tile_dv
    return dk, dv


@_attend.register_fake
def _(q_NhTD: Tensor, _k: Tensor, v_NSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fully_masked_output(q_NhTD, v_NSE)


@_attend_backward.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors[:3])


register_attention_gradients(_attend, _attend_backward, tensors=4)


def _tiles(q_NhTD: Tensor, pattern: Pattern, kernel: Kernel, indices: Tensor | None) -> Iterator[tuple[int, int]]:
    rows, heads, queries, _ = q_NhTD.shape
    first, last = pattern.key_range(queries - 1, queries, indices) if queries else (0, 0)
    return tiles(queries, kernel.elements_per_query(rows, heads, last - first), pattern.max_tile_queries())
