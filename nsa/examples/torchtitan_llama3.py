"""Replace the attention of torchtitan's Llama 3 with Native Sparse Attention (NSA).

    pip install nsa-attention torchtitan
    python torchtitan_llama3.py

`swap_attention(model)` replaces `attention` in every block, and keeps the weights of the dense attention where they
fit. The docstring of llama.py explains what is equal afterwards and what is not. Call the function when the model has
its weights (after `model.init_states()`, or from a checkpoint) and before `parallelize`. FSDP and activation
checkpointing wrap the blocks as before. Tensor and context parallelism support only dense attention, not NSA.

The model's attention must have the attributes that it has in torchtitan 0.3: n_heads, n_kv_heads, head_dim, rope.config
(scaling, theta), wo.weight, and qkv_linear, whose state_dict has wq.weight, wk.weight and wv.weight.

Dimensions: B batch, T tokens, M model width, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa_attention import NSAttention, load_dense_weights


def swap_attention(model: nn.Module, *, open_gate: float = 4.0, **lengths: Any) -> nn.Module:
    """Replace the attention of each block of `model` with NSA, in place, and return `model`.

    `lengths` are passed to NSAttention: block_size, block_count, compress_size, compress_stride, window. Raises
    ValueError for scaled rotary positions and normalized queries or keys, which NSAttention lacks.
    """
    for block in model.layers.values():
        block.attention = TitanNSA(block.attention, open_gate, **lengths)
    return model


class TitanNSA(nn.Module):
    """A replacement for torchtitan's GQAttention, initialized from its weights."""

    def __init__(self, dense: nn.Module, open_gate: float, **options: Any) -> None:
        super().__init__()
        rope, norm = dense.rope.config, getattr(dense, "q_norm", None)
        if rope.scaling != "none" or norm is not None:
            raise ValueError(
                f"swap_attention: expected rope.scaling 'none' and no q_norm, got {rope.scaling!r} and {norm}"
            )
        weights = dense.qkv_linear.state_dict()  # a fused projection is split in it
        q, k, v = (weights[f"{name}.weight"] for name in ("wq", "wk", "wv"))
        out = dense.wo.weight
        self.attention = NSAttention(
            q.shape[1],
            dense.n_heads,
            dense.n_kv_heads,
            head_dim=dense.head_dim,
            compression="mean_mlp",
            rope_base=rope.theta,
            device=q.device,
            dtype=q.dtype,
            **options,
        )
        pairs = [even_dimensions_first(weight, dense.head_dim) for weight in (q, k)]
        load_dense_weights(self.attention, *pairs, v, out, open_gate=open_gate)
        self.cache: Any = None  # the KV cache during generation, otherwise None

    def forward(self, x: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        """Return the output [B, T, M]. With the attention backend "varlen", documents are packed."""
        if self.cache is not None:
            return self.attention(x, cache=self.cache)
        if attention_masks is None:
            return self.attention(x, positions=positions)
        if (starts := getattr(attention_masks, "cu_seq_q", None)) is None:
            raise ValueError("attention_masks: NSA is causal; for packed documents use the attention backend 'varlen'")
        return self.attention(x.flatten(0, 1)[None], cu_seqlens=starts).view_as(x)


def even_dimensions_first(weight: Tensor, width: int) -> Tensor:
    """Return the projection `weight` with rows for rotary pairs (i, i + D/2), from rows for pairs (2i, 2i + 1)."""
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Generate `count` tokens greedily after `tokens` [B, T], and return the new tokens [B, count]."""
    layers = [module for module in model.modules() if isinstance(module, TitanNSA)]
    generated = []
    try:
        for layer in layers:
            layer.cache = layer.attention.new_cache(len(tokens))
        for _ in range(count):
            tokens = model(tokens)[:, -1:].argmax(-1)
            generated.append(tokens)
    finally:
        for layer in layers:
            layer.cache = None
    return torch.cat(generated, 1)


def main() -> None:
    """Replace the attention of torchtitan's debug model with NSA, train one step, and generate tokens."""
    from torchtitan.models.llama3 import model_registry

    torch.manual_seed(0)
    config = model_registry("debugmodel", attn_backend="varlen").model
    for layer in config.layers:
        layer.attention.rope.scaling = "none"
    model = config.build()
    model.init_states()
    swap_attention(model)
    tokens = torch.randint(config.vocab_size, (1, 200))
    loss = nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    print(f"loss {loss:.3f}; generated:", generate(model, tokens[:, :50], 8)[0].tolist())


if __name__ == "__main__":
    main()
