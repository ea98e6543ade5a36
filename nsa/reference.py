"""The specification: each operation as a plain loop over queries, in the dtype it is given. Only tests import it.

Dimensions: H query heads, G groups of them, T tokens, S compressed blocks, D width of a key, E width of a value,
n places. No batch: the specification is for one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1


def attend_rows(q_HTD: Tensor, k_GSD: Tensor, v_GSE: Tensor, seen: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """softmax(q k / sqrt(D)) v over the keys `seen[group][t]`; nothing seen gives 0 and -inf."""
    heads, tokens, width = q_HTD.shape
    per_group = heads // k_GSD.shape[0]
    rows, lses = [], []
    for head in range(heads):
        group = head // per_group
        for t in range(tokens):
            keys = seen[group][t]
            scores = k_GSD[group, keys] @ q_HTD[head, t] * width**-0.5
            rows.append(torch.softmax(scores, 0) @ v_GSE[group, keys])
            lses.append(torch.logsumexp(scores, 0))
    return torch.stack(rows).view(heads, tokens, -1), torch.stack(lses).view(heads, tokens)


def compressed(
    q_HTD: Tensor, k_GSD: Tensor, v_GSE: Tensor, *, block_len: int, block_stride: int
) -> tuple[Tensor, Tensor]:
    """Block i is seen from its last token i*d + l - 1 on."""
    blocks = range(k_GSD.shape[1])
    seen = [[i for i in blocks if i * block_stride + block_len - 1 <= t] for t in range(q_HTD.shape[1])]
    return attend_rows(q_HTD, k_GSD, v_GSE, [seen] * k_GSD.shape[0])


def sliding(q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, *, window: int) -> tuple[Tensor, Tensor]:
    """Token s is seen by query t when t - w < s <= t."""
    seen = [list(range(max(0, t - window + 1), t + 1)) for t in range(q_HTD.shape[1])]
    return attend_rows(q_HTD, k_GTD, v_GTE, [seen] * k_GTD.shape[0])


def selected(
    q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, indices_GTn: Tensor, *, select_len: int
) -> tuple[Tensor, Tensor]:
    """Token s is seen by query t when s <= t and its block s // l' is among the query's indices."""
    tokens = q_HTD.shape[1]
    chosen = [[set(row) - {EMPTY} for row in group] for group in indices_GTn.tolist()]
    seen = [[[s for s in range(t + 1) if s // select_len in group[t]] for t in range(tokens)] for group in chosen]
    return attend_rows(q_HTD, k_GTD, v_GTE, seen)


def importance(q_HTD: Tensor, k_GSD: Tensor, *, block_len: int, block_stride: int, select_len: int) -> Tensor:
    """Importance [G, T, b]: compressed softmax, spread over selection blocks by shared tokens, summed over heads."""
    heads, tokens, width = q_HTD.shape
    groups, compressed_blocks, _ = k_GSD.shape
    result = q_HTD.new_zeros(groups, tokens, -(-tokens // select_len))
    for head in range(heads):
        group = head // (heads // groups)
        for t in range(tokens):
            visible = [i for i in range(compressed_blocks) if i * block_stride + block_len - 1 <= t]
            shares = torch.softmax(k_GSD[group, visible] @ q_HTD[head, t] * width**-0.5, 0)
            for i, share in zip(visible, shares, strict=True):
                for j in range(result.shape[-1]):
                    result[group, t, j] += share * _shared(i, j, block_len, block_stride, select_len) / block_stride
    return result


def choose(importance_GTb: Tensor, *, select_len: int, select_count: int) -> Tensor:
    """Block 0, the current and the previous block, then the most important visible ones, ties to the lower index."""
    groups, tokens, _ = importance_GTb.shape
    indices = torch.full((groups, tokens, select_count), EMPTY, dtype=torch.int32)
    for group in range(groups):
        for t in range(tokens):
            current = t // select_len
            forced = sorted({0, max(0, current - 1), current})
            others = sorted(
                set(range(current + 1)) - set(forced), key=lambda j: (-float(importance_GTb[group, t, j]), j)
            )
            best = (forced + others)[:select_count]
            indices[group, t, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return indices


def _shared(i: int, j: int, block_len: int, block_stride: int, select_len: int) -> int:
    """Tokens that compressed block i and selection block j have in common."""
    begin = max(i * block_stride, j * select_len)
    end = min(i * block_stride + block_len, (j + 1) * select_len)
    return max(0, end - begin)
