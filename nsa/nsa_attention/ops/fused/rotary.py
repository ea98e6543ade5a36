"""Rotary embeddings as a Triton kernel.

The kernel reads each tensor once, with any strides (usually a view of the joint projection), and writes it once. The
products are computed in float32 (float64 for float64 tensors) and rounded once. One launch rotates several tensors,
because below some thousand tokens the host limits the speed. The backward pass is the same kernel with the negative
angles.

Dimensions: B batch, H heads, T tokens, D width, p pairs of dimensions (D/2). Inside the kernel: R rows, one per token
and head; x1 to x4 are the tensors, y1 to y4 the results, c1 to c4 the tables of cosines and sines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .device import load_heads, store_heads
from .launch import (
    CannotLaunchError,
    for_any_length,
    launch,
    next_power_of_two,
    triton_accumulator_dtype,
    with_strides,
)

# Elements that one program rotates. The kernel is limited by memory bandwidth, so tuning gains nothing.
ELEMENTS = 2048
WARPS = 4
MAX_TENSORS = 4  # of one launch: the queries and the keys of three branches


def rotate_rows(tensors: Sequence[Tensor], tables: Sequence[Tensor], sign: float, outputs: Sequence[Tensor]) -> None:
    """Write the rotated `tensors` [B, H, T, D] to `outputs`. All have the same batch size, width and dtype.

    `tables` are the cosines and sines of each tensor, [2, T, p] or [2, B, T, p]. As in plain torch, they are rounded to
    the dtype of the tensors. `sign` is the factor of all angles, 1 or -1. Raises CannotLaunchError if a table does not
    have a row for each token.
    """
    for start in range(0, len(tensors), MAX_TENSORS):
        some = slice(start, start + MAX_TENSORS)
        _launch(tensors[some], tables[some], sign, outputs[some])


def _launch(tensors: Sequence[Tensor], tables: Sequence[Tensor], sign: float, outputs: Sequence[Tensor]) -> None:
    batch, width = tensors[0].shape[0], tensors[0].shape[3]
    padded_pairs = next_power_of_two(width // 2, least=1)
    rows = max(1, ELEMENTS // 2 // padded_pairs)
    missing = MAX_TENSORS - len(tensors)
    strided = [(*with_strides(x), *with_strides(y)) for x, y in zip(tensors, outputs, strict=True)]
    table_arguments = [_table(*pair) for pair in zip(tensors, tables, strict=True)]
    for arguments in (strided, table_arguments):
        arguments += arguments[:1] * missing
    heads = [*(x_BHTD.shape[1] for x_BHTD in tensors), *[0] * missing]
    launch(
        rotated,
        sum(batch * -(-x_BHTD.shape[1] * x_BHTD.shape[2] // rows) for x_BHTD in tensors),
        *(argument for arguments in strided for argument in arguments),
        *(table for table, *_ in table_arguments),
        batch,
        *(size for _, *sizes in table_arguments for size in sizes),
        sign,
        **{f"HEADS_{number}": count for number, count in enumerate(heads, 1)},
        D=width,
        PAIRS_PADDED=padded_pairs,
        ACC=triton_accumulator_dtype(tensors[0].dtype),
        ROWS=rows,
        warps=WARPS,
        # If 16 does not divide the width of a joint projection, it divides the stride of a sequence for some lengths.
        row_stride=math.gcd(*(x_BHTD.stride(axis) for x_BHTD in tensors for axis in (0, 2))),
    )


def _table(x_BHTD: Tensor, table: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Return the kernel arguments for the cosines and sines of a tensor: the table, T, and distances between rows.

    The distances are those of the sines from the cosines, of a sequence from the next, and of a token from the next.
    """
    tokens, pairs = x_BHTD.shape[2], x_BHTD.shape[3] // 2
    if table.shape[-2:] != (tokens, pairs):
        raise CannotLaunchError(
            f"cosines and sines {list(table.shape)}: expected {pairs} for each of {tokens} tokens of width {2 * pairs}"
        )
    # The distances are counted in rows, so the kernel knows for every length what divides an offset.
    if table.stride(-1) != 1 or any(stride % pairs for stride in table.stride()[:-1]):
        table = table.contiguous()
    to_sines, *to_sequence, to_token = (stride // pairs for stride in table.stride()[:-1])
    return table, tokens, to_sines, to_sequence[0] if table.dim() == 4 and table.shape[1] > 1 else 0, to_token


@for_any_length
def rotated(
    p_x1, s_x1b, s_x1h, s_x1t, p_y1, s_y1b, s_y1h, s_y1t,
    p_x2, s_x2b, s_x2h, s_x2t, p_y2, s_y2b, s_y2h, s_y2t,
    p_x3, s_x3b, s_x3h, s_x3t, p_y3, s_y3b, s_y3h, s_y3t,
    p_x4, s_x4b, s_x4h, s_x4t, p_y4, s_y4b, s_y4h, s_y4t,
    p_c1, p_c2, p_c3, p_c4,
    batch,
    tokens_1, sines_1, sequence_1, token_1,
    tokens_2, sines_2, sequence_2, token_2,
    tokens_3, sines_3, sequence_3, token_3,
    tokens_4, sines_4, sequence_4, token_4,
    sign,
    HEADS_1: tl.constexpr, HEADS_2: tl.constexpr, HEADS_3: tl.constexpr, HEADS_4: tl.constexpr,
    D: tl.constexpr, PAIRS_PADDED: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS rows of one of the tensors. A tensor that is missing has no heads."""
    i_tile = _rotate_tile(
        tl.program_id(0), p_x1, s_x1b, s_x1h, s_x1t, p_y1, s_y1b, s_y1h, s_y1t, p_c1, batch,
        tokens_1, sines_1, sequence_1, token_1, sign, HEADS_1, D, PAIRS_PADDED, ACC, ROWS,
    )  # fmt: skip
    i_tile = _rotate_tile(
        i_tile, p_x2, s_x2b, s_x2h, s_x2t, p_y2, s_y2b, s_y2h, s_y2t, p_c2, batch,
        tokens_2, sines_2, sequence_2, token_2, sign, HEADS_2, D, PAIRS_PADDED, ACC, ROWS,
    )  # fmt: skip
    i_tile = _rotate_tile(
        i_tile, p_x3, s_x3b, s_x3h, s_x3t, p_y3, s_y3b, s_y3h, s_y3t, p_c3, batch,
        tokens_3, sines_3, sequence_3, token_3, sign, HEADS_3, D, PAIRS_PADDED, ACC, ROWS,
    )  # fmt: skip
    _rotate_tile(
        i_tile, p_x4, s_x4b, s_x4h, s_x4t, p_y4, s_y4b, s_y4h, s_y4t, p_c4, batch,
        tokens_4, sines_4, sequence_4, token_4, sign, HEADS_4, D, PAIRS_PADDED, ACC, ROWS,
    )  # fmt: skip


@triton.jit
def _rotate_tile(
    i_tile, p_x, s_xb, s_xh, s_xt, p_y, s_yb, s_yh, s_yt, p_c, batch, tokens, sines, sequence, token, sign,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS_PADDED: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate tile `i_tile` if it is in this tensor. Return its number, counted from the first tile of the next tensor.

    In the table `p_c`, the sines are `sines` rows after the cosines. `sequence` and `token` are the distances of a
    sequence and of a token from the next, in rows.
    """
    if HEADS > 0:
        PAIRS: tl.constexpr = D // 2
        tiles = tl.cdiv(tokens * HEADS, ROWS)
        if (i_tile >= 0) & (i_tile < batch * tiles):
            i_b = (i_tile // tiles).to(tl.int64)
            o_row = (i_tile % tiles) * ROWS + tl.arange(0, ROWS)  # [R]
            o_head, o_token, m_row = (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64), o_row < tokens * HEADS
            o_x = i_b * s_xb + o_head * s_xh + o_token * s_xt
            o_y = i_b * s_yb + o_head * s_yh + o_token * s_yt
            o_cosine = (i_b * sequence + o_token * token) * PAIRS
            o_sine = o_cosine + tl.cast(sines, tl.int64) * PAIRS
            b_first = load_heads(p_x, o_x, m_row, PAIRS, PAIRS_PADDED)  # [R, p]
            b_second = load_heads(p_x, o_x + PAIRS, m_row, PAIRS, PAIRS_PADDED)
            b_cosine = load_heads(p_c, o_cosine, m_row, PAIRS, PAIRS_PADDED).to(b_first.dtype).to(ACC)
            b_sine = load_heads(p_c, o_sine, m_row, PAIRS, PAIRS_PADDED).to(b_first.dtype).to(ACC) * sign
            b_first, b_second = b_first.to(ACC), b_second.to(ACC)
            store_heads(p_y, o_y, m_row, b_first * b_cosine - b_second * b_sine, PAIRS, PAIRS_PADDED)
            store_heads(p_y, o_y + PAIRS, m_row, b_first * b_sine + b_second * b_cosine, PAIRS, PAIRS_PADDED)
        i_tile -= batch * tiles
    return i_tile
