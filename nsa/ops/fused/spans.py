"""Which keys a query sees in the two branches where they lie side by side, and which queries see a key.

Dimensions: T queries, S keys. Every span is [start, stop); an empty one has start == stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.packed import alone, compressed_starts, sequence_of


@dataclass(frozen=True, kw_only=True)
class Spans:
    """int32 tensors. The same relation twice: as the forward pass walks it, and as the keys' gradients do."""

    first_key_T: Tensor
    stop_key_T: Tensor
    first_query_S: Tensor
    stop_query_S: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.first_key_T, self.stop_key_T, self.first_query_S, self.stop_query_S


def of_completed_blocks(
    queries: int, blocks: int, block_len: int, block_stride: int, starts: Tensor | None, device: torch.device
) -> Spans:
    """Query t sees block i of its sequence when the block's last token i*d + l - 1 is not after t."""
    starts = alone(queries, device) if starts is None else starts
    first_block = compressed_starts(starts, block_len, block_stride)
    sequence_T, query_T = sequence_of(starts, queries), _places(queries, device)
    inside_T = query_T - starts[sequence_T]
    complete_T = (torch.div(inside_T + 1 - block_len, block_stride, rounding_mode="floor") + 1).clamp_min(0)
    sequence_S = sequence_of(first_block, blocks)
    inside_S = _places(blocks, device) - first_block[sequence_S]
    return Spans(
        first_key_T=first_block[sequence_T],
        stop_key_T=first_block[sequence_T] + complete_T,
        first_query_S=starts[sequence_S] + inside_S * block_stride + block_len - 1,
        stop_query_S=starts[sequence_S + 1],
    )


def of_last_tokens(tokens: int, window: int, starts: Tensor | None, device: torch.device) -> Spans:
    """Query t sees the tokens of its sequence in (t - w, t]."""
    starts = alone(tokens, device) if starts is None else starts
    sequence_T, token_T = sequence_of(starts, tokens), _places(tokens, device)
    return Spans(
        first_key_T=torch.maximum(starts[sequence_T], token_T - window + 1),
        stop_key_T=token_T + 1,
        first_query_S=token_T,
        stop_query_S=torch.minimum(starts[sequence_T + 1], token_T + window),
    )


def _places(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
