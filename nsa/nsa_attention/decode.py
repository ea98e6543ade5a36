"""Decoding with TinyLM: the logits of new tokens, from caches of keys and values.

A model has one cache per layer (kv_cache.py). The logits equal those of the model's parallel forward pass at the same
positions. Tests also use this to find leaks: a token that is decoded on its own cannot attend to later tokens, because
the caches do not contain them.

Dimensions: B batch, C new tokens of a sequence, T tokens of a prompt, M model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import Attention
from .kv_cache import KVCache, new_cache
from .model import TinyLM
from .world import CannotRunError


def new_caches(model: TinyLM, batch_size: int, **options: Any) -> list[KVCache]:
    """Return an empty cache for each layer. The caches share the lengths and the page table of the sequences.

    The options are those of `NSAttention.new_cache`. Raises CannotRunError for attention `stock`, for pages with
    attention `vanilla`, and for a `page_size` that is not a multiple of select_len.
    """
    config, frequencies = model.config, model.get_buffer("frequencies")
    if config.attention is Attention.STOCK:
        raise CannotRunError(
            f"shape {config.name}: attention stock is torch's own layer, which gives no keys to decode from; "
            "use attention nsa or vanilla"
        )
    first = new_cache(config, batch_size, frequencies=frequencies, **options)
    others = [new_cache(config, shared_with=first, frequencies=frequencies) for _ in range(config.layers - 1)]
    return [first, *others]


def prefill(model: TinyLM, tokens_BT: Tensor) -> tuple[Tensor, list[KVCache]]:
    """Return the logits [B, T, vocab] of a prompt, and caches that contain it.

    The prompt may have any length, including 0. `model` must not be wrapped (DDP, FSDP); any device and dtype works.
    Raises CannotRunError for attention `stock`.
    """
    caches = new_caches(model, len(tokens_BT))
    return step(model, tokens_BT, caches), caches


@torch.no_grad()
def step(model: TinyLM, tokens_BC: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """Append new tokens to the caches and return their logits, [B, C, vocab].

    Raises ValueError if the caches have a different number of sequences, MissingImplementationError if the model's
    implementation cannot read them, and OutOfPagesError if too few pages are free.
    """
    return model.head(model.norm(_append(model, tokens_BC, caches)))


@torch.no_grad()
def next_logits(model: TinyLM, tokens: Tensor | Mapping[int, Tensor], caches: Sequence[KVCache]) -> Tensor:
    """Append new tokens to the caches and return the logits of the last one, [B, vocab].

    `tokens` has the shape [B, C], or is a mapping from sequence numbers to new tokens [C], at least one per sequence.
    The logits of a mapping have its order. Raises the same errors as `step`, before any token is appended.
    """
    if isinstance(tokens, Tensor):
        return model.head(model.norm(_append(model, tokens, caches)[:, -1]))
    lengths = dict(zip(tokens, caches[0].select(list(tokens)).lengths, strict=True))
    # Sequences with the same number of new tokens form a batch, separately for prompts and for later tokens.
    batches: dict[tuple[int, bool], list[int]] = {}
    for number, new_tokens in tokens.items():
        batches.setdefault((len(new_tokens), lengths[number] > 0), []).append(number)
    prompts = [number for number in tokens if len(tokens[number]) > 1 and not lengths[number]]
    caches[0].sequences.reserve({number: len(new_tokens) for number, new_tokens in tokens.items()}, prompts)
    last: dict[int, Tensor] = {}
    for numbers in batches.values():
        tokens_BC = torch.stack([tokens[number] for number in numbers])
        x_BCM = _append(model, tokens_BC, [cache.select(numbers) for cache in caches])
        last.update(zip(numbers, x_BCM[:, -1], strict=True))
    return model.head(model.norm(torch.stack([last[number] for number in tokens])))


def _append(model: TinyLM, tokens_BC: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """Append new tokens to the caches and return the output of the last transformer block, [B, C, M]."""
    if len(tokens_BC) != len(caches[0].numbers):
        raise ValueError(
            f"tokens: {len(tokens_BC)} sequences, but the cache has {len(caches[0].numbers)}; "
            "start a new one with prefill"
        )
    x_BCM = model.embed(tokens_BC)
    for block, cache in zip(model.blocks, caches, strict=True):
        x_BCM = x_BCM + block.attn(block.attn_norm(x_BCM), cache=cache)
        x_BCM = x_BCM + block.mlp(block.mlp_norm(x_BCM))
    return x_BCM
