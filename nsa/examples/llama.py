"""Replace the attention of a Hugging Face Llama model with Native Sparse Attention (NSA).

    pip install nsa-attention transformers
    python llama.py

`swap_attention(model)` replaces every attention layer and keeps the trained weights where they fit: the projections of
queries and outputs, and the projections of keys and values in all three branches. Then `model(...)`, `loss.backward()`
and `model.generate(...)` work as before.

What is equal: up to 1024 tokens (`block_count` blocks of `block_size` tokens), the selected branch reads every earlier
token, so it computes the dense attention of the model. At first, the gate of this branch is almost 1 and those of the
other two are almost 0 (`open_gate`), so the logits hardly change.

What cannot be equal: in longer sequences a token sees only the blocks with the highest scores, and the model has never
been trained with so few. The gates, the compression, and keys and values that differ between branches are new. So train
the model further, on sequences as long as those that it will see.

Dimensions: B batch, C new tokens, M model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import flash_attention_mask

from nsa_attention import NSAttention, load_dense_weights

# A mask function that returns None, or the mask [B, T] if a token is padding.
AttentionMaskInterface.register("nsa", flash_attention_mask)


def swap_attention(model: LlamaForCausalLM, *, open_gate: float = 4.0, **lengths: Any) -> LlamaForCausalLM:
    """Replace the attention of each layer of `model` with NSA, in place, and return `model`.

    At first, the gate of the selected branch is sigmoid(open_gate), and the other gates are sigmoid(-open_gate).
    `lengths` are passed to NSAttention: block_size, block_count, compress_size, compress_stride, window. Raises
    ValueError for a model with biases in its attention or with scaled rotary positions, which NSAttention lacks.
    """
    rope = model.config.rope_parameters
    if model.config.attention_bias or rope["rope_type"] != "default":
        raise ValueError(
            "swap_attention: expected attention_bias=False and rope_type='default', got "
            f"{model.config.attention_bias} and {rope['rope_type']!r}"
        )
    for number, block in enumerate(model.model.layers):
        block.self_attn = LlamaNSA(block.self_attn, number, open_gate, rope_base=rope["rope_theta"], **lengths)
    model.config._attn_implementation = "nsa"
    model.config.use_cache = False  # in training; generate() decides for itself
    return model


class LlamaNSA(nn.Module):
    """A replacement for LlamaAttention, initialized from its weights."""

    def __init__(self, dense: nn.Module, number: int, open_gate: float, **options: Any) -> None:
        super().__init__()
        config, weight = dense.config, dense.q_proj.weight
        self.number = number
        self.attention = NSAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=dense.head_dim,
            compression="mean_mlp",
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        weights = (dense.q_proj.weight, dense.k_proj.weight, dense.v_proj.weight, dense.o_proj.weight)
        load_dense_weights(self.attention, *weights, open_gate=open_gate)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the output [B, C, M], and None instead of attention weights."""
        if attention_mask is not None:
            raise ValueError("attention_mask: NSA does not support padding; pass sequences of one length")
        cache = past_key_values if cache is None else cache  # its name in transformers 5 before 5.20
        if cache is None:
            positions = position_ids[0] if position_ids is not None and len(position_ids) == 1 else position_ids
            return self.attention(hidden_states, positions=positions), None
        return self.attention(hidden_states, cache=nsa_cache(cache, self, len(hidden_states))), None


def nsa_cache(cache: Cache, layer: LlamaNSA, batch: int) -> Any:
    """Return the cache of an NSA layer, which is stored in the model's `cache`."""
    while len(cache.layers) <= layer.number:
        cache.layers.append(NSACacheLayer(layer.attention, batch))
    if not isinstance(cache.layers[layer.number], NSACacheLayer):
        cache.layers[layer.number] = NSACacheLayer(layer.attention, batch)
    return cache.layers[layer.number].cache


class NSACacheLayer(CacheLayerMixin):
    """An entry of a transformers cache, with the KV cache of one NSA layer."""

    def __init__(self, attention: NSAttention, batch: int) -> None:
        super().__init__()
        self.cache = attention.new_cache(batch)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing, because NSAttention allocates its cache."""

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise NotImplementedError, because NSAttention updates its cache itself."""
        raise NotImplementedError("NSAttention updates its cache itself")

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.cache.lengths[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after `query_length` new tokens, and the offset of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, because the cache has no fixed length."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raise NotImplementedError, because NSA caches do not support beam search."""
        raise NotImplementedError("NSA caches do not support beam search; use num_beams=1")


def main() -> None:
    """Replace the attention of a small random Llama with NSA, train one step, and generate tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.randint(100, (1, 200))
    before = model(tokens).logits
    swap_attention(model)
    after = model(tokens, labels=tokens)
    print(f"largest change of a logit: {(after.logits - before).abs().max():.3f} of {before.abs().max():.3f}")
    after.loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    print(f"loss {after.loss:.3f}; generated:", model.generate(tokens[:, :50], max_new_tokens=8)[0, 50:].tolist())


if __name__ == "__main__":
    main()
