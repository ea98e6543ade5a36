"""The selected branch on a CPU, computed one block of keys at a time.

With a mask over all keys, work would grow with T squared; gathering the blocks of each query would copy every key for
every query that selected it. Here a block stays in the CPU cache, the rows of its readers (the queries that selected
it) are gathered, and one matrix product computes all their heads. The first queries attend to every block before them;
they are computed as plain causal attention.

If the norms of queries and keys show that no score can be large, exponentials of the scores are summed directly.
Otherwise the blocks of a query are merged with a running maximum and sum. The backward pass starts from the final
log-sum-exp.

Dimensions: B batch, H query heads, G groups, N batch x groups, h heads of a group, T queries, S keys, D key width, E
value width, n selected blocks per query, m queries of a chunk, r rows of a chunk (m x h), L keys of a block, w width of
a row (h x D or h x E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from . import NAMESPACE
from .autograd import register_attention_gradients
from .cpu_threads import run_in_threads, split_work
from .kernels import (
    TileState,
    autocast_disabled,
    causal_backward,
    causal_forward,
    compute_dtype,
    fully_masked_output,
    fused_cpu_reason,
)


@dataclass(frozen=True, kw_only=True)
class BlockReaders:
    """The queries that selected each block of keys.

    A query that selected a block twice is listed once; blocks that start after the query are ignored.
    """

    unmasked_queries: int  # leading queries that attend to every block up to their own, as in causal attention
    select_len: int
    keys: int
    rows: int  # batch x groups
    # The queries of all blocks of all rows, ascending within a block, counted from query `unmasked_queries`.
    queries: Tensor
    ends: list[int]  # index in `queries` after the last query of each block, row by row

    def rows_with_readers(self, rows: slice) -> range:
        """Return the row numbers in the slice `rows`, or an empty range if no query selected a block."""
        return range(self.rows if len(self.queries) else 0)[rows]

    def chunks(self, row: int, max_queries: int) -> Iterator[Chunk]:
        """Yield the chunks of a row. Each is a block of keys with at most `max_queries` queries that selected it."""
        blocks = -(-self.keys // self.select_len)
        for block in range(blocks):
            position = row * blocks + block
            begin, end = self.ends[position - 1] if position else 0, self.ends[position]
            first = block * self.select_len
            last = min(first + self.select_len, self.keys)
            parts = -(-(end - begin) // max_queries)
            cuts = [begin + (end - begin) * part // parts for part in range(parts + 1)] if parts else []
            for start, stop in pairwise(cuts):
                yield Chunk(queries=self.queries[start:stop], before=self.unmasked_queries, first=first, last=last)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of keys and several queries that attend to it."""

    queries: Tensor  # counted from query number `before`
    before: int
    first: int
    last: int

    def hide_later_(self, scores_mhL: Tensor) -> None:
        """Set the scores of keys that come after their query to -inf, in place."""
        if int(self.queries[0]) + self.before >= self.last:
            return  # only queries inside the block have later keys
        own = self.queries[: self.last - self.first, None] + self.before
        later = torch.arange(self.first, self.last) > own
        scores_mhL[: len(own)].masked_fill_(later[:, None], -torch.inf)


def block_readers(indices_NTn: Tensor, select_len: int, keys: int, *, separate_leading: bool) -> BlockReaders:
    """Return the queries that selected each block of keys.

    With `separate_leading`, the result excludes the leading queries that attend to every block up to their own.
    """
    rows, queries, _ = indices_NTn.shape
    blocks = -(-keys // select_len)
    pair = _unique_reads(indices_NTn, select_len, blocks)
    unmasked_queries = _count_unmasked(pair, rows, queries, select_len, blocks) if separate_leading else 0
    query = pair % max(1, queries)
    is_listed = query >= unmasked_queries
    ends = torch.bincount(pair[is_listed] // max(1, queries), minlength=rows * blocks).cumsum(0)
    return BlockReaders(
        unmasked_queries=unmasked_queries,
        select_len=select_len,
        keys=keys,
        rows=rows,
        queries=query[is_listed] - unmasked_queries,
        ends=ends.tolist(),
    )


def _unique_reads(indices_NTn: Tensor, select_len: int, blocks: int) -> Tensor:
    """Return each distinct triple (row, block, query that selected the block), packed into sorted integers."""
    rows, queries, _ = indices_NTn.shape
    block = indices_NTn.long()
    query = torch.arange(queries)[:, None]
    row = torch.arange(rows)[:, None, None]
    is_read = (block >= 0) & (block * select_len <= query)
    pair = torch.where(is_read, (row * blocks + block) * queries + query, -1).flatten().sort().values
    first_of_its_kind = torch.ones_like(pair, dtype=torch.bool)
    torch.ne(pair[1:], pair[:-1], out=first_of_its_kind[1:])
    return pair[first_of_its_kind & (pair >= 0)]


def _count_unmasked(pair: Tensor, rows: int, queries: int, select_len: int, blocks: int) -> int:
    of_row = torch.div(pair, queries * blocks, rounding_mode="floor") * queries + pair % queries
    read_NT = torch.bincount(of_row, minlength=rows * queries).view(rows, queries)
    sees_all = (read_NT == torch.arange(queries) // select_len + 1).all(0)
    return int(sees_all.long().cumprod(0).sum())


# Rows (queries x heads) that share a matrix product. Fewer rows need more calls, more rows do not fit into the cache.
MAX_CHUNK_ROWS = 3072
# Up to this absolute score, exponentials, their sums and the inverses of the sums are well within the float32 range.
SAFE_SCORE = 40.0
# For shorter sequences, the calls per block cost more time than reading masked keys.
MIN_TOKENS = 1024


def blockwise(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, indices_BGTn: Tensor, *, select_len: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to the selected blocks.

    Work and memory grow linearly with T. The log-sum-exp has no gradient.
    """
    batch, heads, queries, _ = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    o_NhTE, lse_NhT = _blockwise(
        q_BHTD.reshape(rows, heads // groups, queries, q_BHTD.shape[3]),
        k_BGSD.reshape(rows, *k_BGSD.shape[2:]),
        v_BGSE.reshape(rows, *v_BGSE.shape[2:]),
        indices_BGTn.reshape(rows, queries, indices_BGTn.shape[3]),
        select_len,
        scale,
    )
    return o_NhTE.reshape(batch, heads, queries, v_BGSE.shape[3]), lse_NhT.reshape(batch, heads, queries)


def reason_blockwise_is_slower(queries: int, places: int, select_len: int) -> str | None:
    """Return the reason why `blockwise` is slower than masked attention over all keys, or None if it is faster.

    `places` is the number of selected blocks per query.
    """
    if queries < MIN_TOKENS:
        return f"{queries} tokens are fewer than {MIN_TOKENS}"
    if queries < 2 * places * select_len:
        return f"{places} blocks of {select_len} tokens are more than half of {queries} tokens"
    return None


def minimum_tokens(places: int, select_len: int) -> int:
    """Return the shortest length for which `blockwise` with `places` blocks is faster than masked attention."""
    return max(MIN_TOKENS, 2 * places * select_len)


@torch.library.custom_op(f"{NAMESPACE}::blockwise", mutates_args=())
def _blockwise(
    q_NhTD: Tensor, k_NSD: Tensor, v_NSE: Tensor, indices_NTn: Tensor, select_len: int, scale: float
) -> tuple[Tensor, Tensor]:
    o, lse = fully_masked_output(q_NhTD, v_NSE)
    reads = _readers(q_NhTD, k_NSD, v_NSE, indices_NTn, select_len)
    first = reads.unmasked_queries
    with autocast_disabled(q_NhTD):
        if first:
            causal = causal_forward(q_NhTD[:, :, :first], k_NSD[:, :first], v_NSE[:, :first], scale)
            o[:, :, :first], lse[:, :, :first] = causal

    def piece(rows: slice, heads: slice) -> None:
        for number in reads.rows_with_readers(rows):
            row = _Group.from_tensors(q_NhTD[number, heads, first:], k_NSD[number], v_NSE[number], scale)
            o_ThE, lse_Th = _row_forward(row, reads.chunks(number, row.max_chunk_queries))
            o[number, heads, first:], lse[number, heads, first:] = o_ThE.transpose(0, 1), lse_Th.t()

    with autocast_disabled(q_NhTD):
        run_in_threads([partial(piece, *share) for share in split_work(q_NhTD.device, *q_NhTD.shape[:2])])
    return o, lse


@torch.library.custom_op(f"{NAMESPACE}::blockwise_backward", mutates_args=())
def _blockwise_backward(
    grad_NhTE: Tensor,
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices_NTn: Tensor,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    select_len: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.zeros_like(q_NhTD, memory_format=torch.contiguous_format)
    dk = k_NSD.new_zeros(k_NSD.shape, dtype=compute_dtype(k_NSD))
    dv = v_NSE.new_zeros(v_NSE.shape, dtype=compute_dtype(v_NSE))
    reads = _readers(q_NhTD, k_NSD, v_NSE, indices_NTn, select_len)
    first = reads.unmasked_queries
    with autocast_disabled(q_NhTD):
        if first:
            grad, q, o, lse = (tensor[:, :, :first] for tensor in (grad_NhTE, q_NhTD, o_NhTE, lse_NhT))
            state = TileState(q=q, k=k_NSD[:, :first], v=v_NSE[:, :first], output=o, lse=lse)
            dq[:, :, :first], dk[:, :first], dv[:, :first] = causal_backward(grad, state, scale)

    def piece(rows: slice, heads: slice) -> list[tuple[int, Tensor, Tensor]]:
        gradients = []
        for number in reads.rows_with_readers(rows):
            grad, q, o, lse = (tensor[number, heads, first:] for tensor in (grad_NhTE, q_NhTD, o_NhTE, lse_NhT))
            row = _Group.from_tensors(q, k_NSD[number], v_NSE[number], scale)
            dq_ThD, dk_SD, dv_SE = _row_backward(row, grad, o, lse, reads.chunks(number, row.max_chunk_queries))
            dq[number, heads, first:] = dq_ThD.mul_(scale).transpose(0, 1)
            gradients.append((number, dk_SD, dv_SE))
        return gradients

    with autocast_disabled(q_NhTD):
        cut = [partial(piece, *share) for share in split_work(q_NhTD.device, *q_NhTD.shape[:2])]
        # Add in the order of the pieces, not of their completion, so that the sum is reproducible.
        for number, dk_SD, dv_SE in chain.from_iterable(run_in_threads(cut)):
            dk[number] += dk_SD
            dv[number] += dv_SE
    # An operator must not return its inputs or views of them. `to` may return `dk` itself, which is a new tensor.
    return dq, dk.to(k_NSD.dtype), dv.to(v_NSE.dtype)


@_blockwise.register_fake
def _(q_NhTD: Tensor, _k: Tensor, v_NSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fully_masked_output(q_NhTD, v_NSE)


@_blockwise_backward.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors[:3])


register_attention_gradients(_blockwise, _blockwise_backward, tensors=4)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The queries, keys and values of one sequence and group, in the accumulation dtype."""

    q: Tensor  # [T, h * D], multiplied by the scale
    k: Tensor  # [S, D]
    v: Tensor  # [S, E]
    heads: int
    scores_are_safe: bool  # no score exceeds SAFE_SCORE
    scratch: _Scratch

    @classmethod
    def from_tensors(cls, q_hTD: Tensor, k_SD: Tensor, v_SE: Tensor, scale: float) -> _Group:
        k_SD, v_SE = (tensor.to(compute_dtype(q_hTD)) for tensor in (k_SD, v_SE))
        q = _query_major(q_hTD).mul_(scale)
        largest = _largest_norm(q.view(-1, q_hTD.shape[2])) * _largest_norm(k_SD)
        return cls(
            q=q, k=k_SD, v=v_SE, heads=q_hTD.shape[0], scores_are_safe=largest <= SAFE_SCORE, scratch=_Scratch(k_SD)
        )

    @property
    def max_chunk_queries(self) -> int:
        return max(1, MAX_CHUNK_ROWS // self.heads)

    def gather(self, name: str, x_Tw: Tensor, chunk: Chunk, like_SX: Tensor) -> Tensor:
        """Return the rows of `x_Tw` for the chunk's queries, reshaped to the width of `like_SX`.

        The result is in the buffer `name` and valid until the buffer is used again.
        """
        rows = self.scratch.buffer(name, len(chunk.queries), x_Tw.shape[1])
        return torch.index_select(x_Tw, 0, chunk.queries, out=rows).view(-1, like_SX.shape[-1])

    def matmul(self, name: str, left_rX: Tensor, right_XY: Tensor) -> Tensor:
        return torch.mm(left_rX, right_XY, out=self.scratch.buffer(name, left_rX.shape[0], right_XY.shape[1]))

    def add_to(self, sums_Tw: Tensor, chunk: Chunk, left_rL: Tensor, right_LX: Tensor) -> None:
        """Add the product of `left_rL` and `right_LX` to the rows of `sums_Tw` for the chunk's queries."""
        # A query occurs at most once in a chunk, so the result does not depend on the order of additions.
        sums_Tw.index_add_(0, chunk.queries, self.matmul("product", left_rL, right_LX).view(-1, sums_Tw.shape[1]))

    def scores(self, q_rD: Tensor, chunk: Chunk) -> Tensor:
        """Return the masked scores of the chunk, shape [r, L], with one row per query and head."""
        scores = self.matmul("scores", q_rD, self.k[chunk.first : chunk.last].t())
        chunk.hide_later_(scores.view(len(chunk.queries), self.heads, -1))
        return scores


class _Scratch:
    """A set of reusable buffers for intermediate tensors."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return an uninitialized buffer, valid until the next call with the same name."""
        storage = self._buffers.get(name)
        if storage is None or storage.numel() < rows * columns:
            storage = self._buffers[name] = self._like.new_empty(rows * columns)
        return storage[: rows * columns].view(rows, columns)


def _row_forward(row: _Group, chunks: Iterator[Chunk]) -> tuple[Tensor, Tensor]:
    """Return the output [T, h, E] and log-sum-exp [T, h] of one sequence and group."""
    queries = row.q.shape[0]
    o = row.q.new_zeros(queries, row.heads * row.v.shape[-1])
    total = row.q.new_zeros(queries, row.heads)
    # After a chunk, the maximum of its queries is finite: each query attends to the first key of the block.
    highest = None if row.scores_are_safe else row.q.new_full((queries, row.heads), -torch.inf)
    for chunk in chunks:
        weights = row.scores(row.gather("q", row.q, chunk, row.k), chunk)
        if highest is not None:
            before = highest.index_select(0, chunk.queries)
            after = torch.maximum(before, weights.amax(-1).view_as(before))
            weights.sub_(after.view(-1, 1))
            _rescale(o, total, chunk, before.sub_(after).exp_())
            highest.index_copy_(0, chunk.queries, after)
        weights.exp_()
        total.index_add_(0, chunk.queries, weights.sum(-1).view(-1, row.heads))
        row.add_to(o, chunk, weights, row.v[chunk.first : chunk.last])
    # A query without visible keys has total 0: its output stays 0 and its log-sum-exp is -inf.
    lse = total.log() if highest is None else highest + total.log()
    return o.view(queries, row.heads, -1).div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), lse


def _rescale(o: Tensor, total: Tensor, chunk: Chunk, factor_mh: Tensor) -> None:
    """Multiply `o` and `total` by `factor_mh`, in the rows of the chunk's queries."""
    o_mhE = o.index_select(0, chunk.queries).view(*factor_mh.shape, -1).mul_(factor_mh.unsqueeze(-1))
    o.index_copy_(0, chunk.queries, o_mhE.flatten(1))
    total.index_copy_(0, chunk.queries, total.index_select(0, chunk.queries).mul_(factor_mh))


def _row_backward(
    row: _Group, grad_hTE: Tensor, o_hTE: Tensor, lse_hT: Tensor, chunks: Iterator[Chunk]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scaled queries [T, h, D], of the keys [S, D] and of the values [S, E]."""
    grad = _query_major(grad_hTE)
    lse = lse_hT.t().contiguous()
    delta = (grad_hTE.to(grad.dtype) * o_hTE).sum(-1).t().contiguous()
    if row.scores_are_safe:
        # The weights are exp(score - lse). The factor exp(-lse) is applied to the gradient and to delta instead of to
        # every weight. Queries without visible keys are in no chunk.
        inverse_totals_Th = lse.neg().exp_()
        grad.view(*inverse_totals_Th.shape, -1).mul_(inverse_totals_Th.unsqueeze(-1))
        delta.mul_(inverse_totals_Th)
    dq, dk, dv = torch.zeros_like(row.q), torch.zeros_like(row.k), torch.zeros_like(row.v)
    for chunk in chunks:
        keys = slice(chunk.first, chunk.last)
        q_rD, grad_rE = row.gather("q", row.q, chunk, row.k), row.gather("grad", grad, chunk, row.v)
        weights = row.scores(q_rD, chunk)
        if not row.scores_are_safe:
            weights.sub_(_gather_column(lse, chunk))
        weights.exp_()
        d_scores = row.matmul("d_scores", grad_rE, row.v[keys].t()).sub_(_gather_column(delta, chunk)).mul_(weights)
        dv[keys].addmm_(weights.t(), grad_rE)
        dk[keys].addmm_(d_scores.t(), q_rD)
        row.add_to(dq, chunk, d_scores, row.k[keys])
    return dq.view(dq.shape[0], row.heads, -1), dk, dv


def _query_major(x_hTD: Tensor) -> Tensor:
    """Return a copy of `x_hTD` with the heads of a query adjacent, [T, h * D], in the accumulation dtype."""
    rows = x_hTD.new_empty((x_hTD.shape[1], x_hTD.shape[0], x_hTD.shape[2]), dtype=compute_dtype(x_hTD))
    return rows.copy_(x_hTD.transpose(0, 1)).flatten(1)


def _largest_norm(rows_rD: Tensor) -> float:
    return float(rows_rD.norm(dim=-1).amax()) if rows_rD.numel() else 0.0


def _gather_column(x_Th: Tensor, chunk: Chunk) -> Tensor:
    return x_Th.index_select(0, chunk.queries).view(-1, 1)


def _readers(q_NhTD: Tensor, k_NSD: Tensor, v_NSE: Tensor, indices_NTn: Tensor, select_len: int) -> BlockReaders:
    causal = fused_cpu_reason(q_NhTD, v_NSE) is None
    return block_readers(indices_NTn, select_len, k_NSD.shape[1], separate_leading=causal)
