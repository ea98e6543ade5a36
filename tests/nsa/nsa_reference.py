"""A reference implementation of NSA (arXiv 2502.11089) as plain loops over queries.

Each function computes in the dtype of its inputs and takes one sequence, without a batch dimension. `weights` maps the
names of the model's state_dict to tensors.

Dimensions: H query heads, G groups of query heads, T tokens, S compressed blocks, b selection blocks, M model width, F
hidden width of the MLP, D key width, E value width, p pairs of dimensions, l tokens of a compressed block, n selected
blocks per query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EMPTY = -1
ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of a layer that cannot be inferred from its weights."""

    heads: int
    groups: int
    block_len: int
    block_stride: int
    select_len: int
    select_count: int
    window: int


def attend_rows(q_HTD: Tensor, k_GSD: Tensor, v_GSE: Tensor, visible: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """Return the attention output [H, T, E] and the log-sum-exp [H, T] of the scores.

    `visible[group][t]` lists the keys that query t attends to. A query without keys, or with only scores of -inf, gets
    output 0 and log-sum-exp -inf.
    """
    heads, tokens, width = q_HTD.shape
    per_group = heads // k_GSD.shape[0]
    rows, lses = [], []
    for head in range(heads):
        group = head // per_group
        for t in range(tokens):
            keys = visible[group][t]
            scores = k_GSD[group, keys] @ q_HTD[head, t] * width**-0.5
            rows.append(_softmax(scores) @ v_GSE[group, keys])
            lses.append(torch.logsumexp(scores, 0))
    return torch.stack(rows).view(heads, tokens, -1), torch.stack(lses).view(heads, tokens)


def compressed_attention(
    q_HTD: Tensor, k_GSD: Tensor, v_GSE: Tensor, *, block_len: int, block_stride: int
) -> tuple[Tensor, Tensor]:
    """Return the output [H, T, E] and log-sum-exp [H, T] of attention to compressed blocks."""
    # Query t attends to block i if the block's last token, i * block_stride + block_len - 1, is not after t.
    blocks = range(k_GSD.shape[1])
    visible = [[i for i in blocks if i * block_stride + block_len - 1 <= t] for t in range(q_HTD.shape[1])]
    return attend_rows(q_HTD, k_GSD, v_GSE, [visible] * k_GSD.shape[0])


def sliding_attention(q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, *, window: int) -> tuple[Tensor, Tensor]:
    """Return the output [H, T, E] and log-sum-exp [H, T] of sliding-window attention."""
    # Query t attends to token s if t - window < s <= t.
    visible = [list(range(max(0, t - window + 1), t + 1)) for t in range(q_HTD.shape[1])]
    return attend_rows(q_HTD, k_GTD, v_GTE, [visible] * k_GTD.shape[0])


def selected_attention(
    q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, indices_GTn: Tensor, *, select_len: int
) -> tuple[Tensor, Tensor]:
    """Return the output [H, T, E] and log-sum-exp [H, T] of attention to the selected blocks."""
    # Query t attends to token s if s <= t and block s // select_len is one of its indices. EMPTY entries are ignored.
    tokens = q_HTD.shape[1]
    selected_blocks = [[set(row) - {EMPTY} for row in group] for group in indices_GTn.tolist()]
    visible = [
        [[s for s in range(t + 1) if s // select_len in group[t]] for t in range(tokens)] for group in selected_blocks
    ]
    return attend_rows(q_HTD, k_GTD, v_GTE, visible)


def importance(q_HTD: Tensor, k_GSD: Tensor, *, block_len: int, block_stride: int, select_len: int) -> Tensor:
    """Return the importance of each selection block for each query, shape [G, T, b] (NSA paper, eq. 8 to 10)."""
    # The softmax over compressed blocks is distributed over the selection blocks in proportion to the tokens they
    # share, and summed over the heads of a group.
    heads, tokens, width = q_HTD.shape
    groups, compressed_blocks, _ = k_GSD.shape
    result = q_HTD.new_zeros(groups, tokens, -(-tokens // select_len))
    for head in range(heads):
        group = head // (heads // groups)
        for t in range(tokens):
            visible = [i for i in range(compressed_blocks) if i * block_stride + block_len - 1 <= t]
            shares = _softmax(k_GSD[group, visible] @ q_HTD[head, t] * width**-0.5)
            for i, share in zip(visible, shares, strict=True):
                for j in range(result.shape[-1]):
                    result[group, t, j] += (
                        share * _shared_tokens(i, j, block_len, block_stride, select_len) / block_stride
                    )
    return result


def select_blocks(importance_GTb: Tensor, *, select_len: int, select_count: int) -> Tensor:
    """Return the indices of the blocks that each query selects, int32, shape [G, T, n] (NSA paper, eq. 11).

    Block 0, the query's own block and the previous block come first, then the most important visible blocks; of equally
    important blocks the lower index comes first. Unused entries are EMPTY.
    """
    groups, tokens, _ = importance_GTb.shape
    indices = torch.full((groups, tokens, select_count), EMPTY, dtype=torch.int32)
    for group in range(groups):
        for t in range(tokens):
            current = t // select_len
            forced_blocks = sorted({0, max(0, current - 1), current})
            others = sorted(
                set(range(current + 1)) - set(forced_blocks), key=lambda j: (-float(importance_GTb[group, t, j]), j)
            )
            block_row = (forced_blocks + others)[:select_count]
            indices[group, t, : len(block_row)] = torch.tensor(block_row, dtype=torch.int32)
    return indices


def block(x_TM: Tensor, weights: Mapping[str, Tensor], sizes: LayerSizes) -> Tensor:
    """Return the output [T, M] of a transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""
    normed_TM = functional.rms_norm(x_TM, x_TM.shape[-1:], weights["attn_norm.weight"], NORM_EPSILON)
    x_TM = x_TM + attention(normed_TM, _with_prefix(weights, "attn"), sizes)
    normed_TM = functional.rms_norm(x_TM, x_TM.shape[-1:], weights["mlp_norm.weight"], NORM_EPSILON)
    hidden_TF = functional.silu(normed_TM @ weights["mlp.gate.weight"].T) * (normed_TM @ weights["mlp.up.weight"].T)
    return x_TM + hidden_TF @ weights["mlp.down.weight"].T


def attention(x_TM: Tensor, weights: Mapping[str, Tensor], sizes: LayerSizes) -> Tensor:
    """Return the output [T, M] of an NSA layer (NSA paper, eq. 5)."""
    tokens = range(x_TM.shape[0])
    q_HTD = rotate(_heads(x_TM, weights["q_proj.weight"], sizes.heads), tokens)
    lengths = {"block_len": sizes.block_len, "block_stride": sizes.block_stride}
    last_tokens = [start + sizes.block_len - 1 for start in _starts(len(tokens), sizes)]
    outputs, scorer_keys = [], None
    if "cmp.k_proj.weight" in weights:
        branch_weights = _with_prefix(weights, "cmp")
        scorer_keys = rotate(
            _blocks(_heads(x_TM, branch_weights["k_proj.weight"], sizes.groups), branch_weights, "k", sizes),
            last_tokens,
        )
        values = _blocks(_heads(x_TM, branch_weights["v_proj.weight"], sizes.groups), branch_weights, "v", sizes)
        outputs.append(compressed_attention(q_HTD, scorer_keys, values, **lengths)[0])
    if "sel.k_proj.weight" in weights:
        branch_weights = _with_prefix(weights, "sel")
        keys = _heads(x_TM, branch_weights["k_proj.weight"], sizes.groups)
        if scorer_keys is None:
            scorer_keys = rotate(_blocks(keys, {}, "k", sizes), last_tokens)
        importance_GTb = importance(q_HTD.detach(), scorer_keys.detach(), **lengths, select_len=sizes.select_len)
        indices = select_blocks(importance_GTb, select_len=sizes.select_len, select_count=sizes.select_count)
        values = _heads(x_TM, branch_weights["v_proj.weight"], sizes.groups)
        outputs.append(selected_attention(q_HTD, rotate(keys, tokens), values, indices, select_len=sizes.select_len)[0])
    if "win.k_proj.weight" in weights:
        branch_weights = _with_prefix(weights, "win")
        keys, values = (_heads(x_TM, branch_weights[f"{name}_proj.weight"], sizes.groups) for name in "kv")
        outputs.append(sliding_attention(q_HTD, rotate(keys, tokens), values, window=sizes.window)[0])
    gates_cHT = _gates(x_TM, _with_prefix(weights, "gate_mlp"), sizes.heads)
    mixed_HTE = sum(gate.unsqueeze(-1) * output for gate, output in zip(gates_cHT, outputs, strict=True))
    return mixed_HTE.transpose(0, 1).flatten(1) @ weights["out_proj.weight"].T


def rotate(x_HTD: Tensor, positions: Sequence[int]) -> Tensor:
    """Apply rotary embeddings for `positions` to `x_HTD`."""
    # Each pair of dimensions (i, i + D/2) is rotated by position * 10000^(-2i/D).
    width = x_HTD.shape[-1]
    pairs = torch.complex(x_HTD[..., : width // 2], x_HTD[..., width // 2 :])
    angles_Tp = angles(positions, width).to(x_HTD.dtype)
    rotated = pairs * torch.polar(torch.ones_like(angles_Tp), angles_Tp)
    return torch.cat((rotated.real, rotated.imag), -1)


def angles(positions: Sequence[int], width: int) -> Tensor:
    """Return the rotary angles at `positions` in radians, float64, shape [T, D/2]."""
    rows = [[position * ROTARY_BASE ** (-2 * i / width) for i in range(width // 2)] for position in positions]
    return torch.tensor(rows, dtype=torch.float64).view(len(positions), width // 2)


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax of the scores of one query, or zeros if every score is -inf."""
    return scores.exp() if bool((scores == -torch.inf).all()) else torch.softmax(scores, 0)


def _blocks(x_GTD: Tensor, weights: Mapping[str, Tensor], side: str, sizes: LayerSizes) -> Tensor:
    """Return one compressed vector per complete block, shape [G, S, D] (NSA paper, eq. 7).

    The names of the weights show whether the vector is an MLP of the block, its mean, or the sum of both. `side` is "k"
    for keys or "v" for values.
    """
    groups, tokens, width = x_GTD.shape
    vectors = []
    for start in _starts(tokens, sizes):
        inside_GlD = x_GTD[:, start : start + sizes.block_len]
        own = _with_prefix(weights, f"{side}_blocks")
        if "hidden.weight" in own:
            vector = _mlp(inside_GlD + own["position"], own, "hidden", "out")
        elif own:
            vector = inside_GlD.mean(1) + _mlp(inside_GlD + own["position"], own, "inner", "outer")
        else:
            vector = inside_GlD.mean(1)
        vectors.append(vector)
    return torch.stack(vectors, 1) if vectors else x_GTD.new_zeros(groups, 0, width)


def _mlp(block_GlD: Tensor, weights: Mapping[str, Tensor], first: str, second: str) -> Tensor:
    inner = functional.gelu(block_GlD.flatten(1) @ weights[f"{first}.weight"].T + weights[f"{first}.bias"])
    return inner @ weights[f"{second}.weight"].T + weights[f"{second}.bias"]


def _gates(x_TM: Tensor, weights: Mapping[str, Tensor], heads: int) -> Tensor:
    hidden = functional.silu(x_TM @ weights["hidden.weight"].T + weights["hidden.bias"])
    return torch.sigmoid(hidden @ weights["weight"].T + weights["bias"]).T.unflatten(0, (-1, heads))


def _heads(x_TM: Tensor, weight: Tensor, heads: int) -> Tensor:
    return (x_TM @ weight.T).unflatten(-1, (heads, -1)).transpose(0, 1)


def _with_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: weight for name, weight in weights.items() if name.startswith(f"{prefix}.")}


def _starts(tokens: int, sizes: LayerSizes) -> range:
    return range(0, tokens - sizes.block_len + 1, sizes.block_stride)


def _shared_tokens(i: int, j: int, block_len: int, block_stride: int, select_len: int) -> int:
    begin = max(i * block_stride, j * select_len)
    end = min(i * block_stride + block_len, (j + 1) * select_len)
    return max(0, end - begin)
