"""Initialization of an NSA layer from the weights of a trained dense attention layer.

Dimensions: M model width, H query heads, G key and value heads, D key width, E value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import NSAttention
from .compression import BlockMeanMLP


@torch.no_grad()
def load_dense_weights(
    layer: NSAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, open_gate: float = 4.0
) -> None:
    """Copy the projection weights of a dense causal attention layer to `layer`, which then has nearly the same output.

    `q` [H * D, M], `k` [G * D, M], `v` [G * E, M] and `out` [M, H * E] are weights of linear layers without biases. All
    three branches start with the same keys and values. The rows of `q` and `k` must have the order of the rotary
    embeddings of `layer`, which rotate the dimensions i and i + D / 2 of a head together.

    At first, the gate of the selected branch is sigmoid(open_gate), and the gates of the other branches are
    sigmoid(-open_gate). In a sequence that fits into the selected blocks (1024 tokens by default), the selected branch
    attends to all earlier tokens, as the dense layer does. In longer sequences a token attends only to the blocks with
    the highest scores. With the compression "mean_mlp", the compressed keys, which rank the blocks, are means at first.

    Raises a ValueError that lists every weight whose shape does not fit.
    """
    branches = (layer.cmp, layer.sel, layer.win)
    pairs: dict[str, tuple[nn.Linear, Tensor]] = {
        "q": (layer.q_proj, q),
        "k": (layer.sel.k_proj, k),
        "v": (layer.sel.v_proj, v),
        "out": (layer.out_proj, out),
    }
    problems = [
        f"{name}: expected the shape {list(linear.weight.shape)}, got {list(weight.shape)}"
        for name, (linear, weight) in pairs.items()
        if linear.weight.shape != weight.shape
    ]
    if problems:
        raise ValueError("load_dense_weights: " + "; ".join(problems))
    layer.q_proj.weight.copy_(q)
    layer.out_proj.weight.copy_(out)
    for branch in branches:
        branch.k_proj.weight.copy_(k)
        branch.v_proj.weight.copy_(v)
    # With weights of zero, the gates do not depend on the token at first. Their gradients are not zero.
    nn.init.zeros_(layer.gate_mlp.weight)
    signs = layer.gate_mlp.bias.new_tensor([-1.0, 1.0, -1.0])
    layer.gate_mlp.bias.copy_((open_gate * signs).repeat_interleave(layer.config.heads))
    for blocks in (layer.cmp.k_blocks, layer.cmp.v_blocks):
        if isinstance(blocks, BlockMeanMLP):  # its MLP is added to the mean
            last = blocks.get_submodule(blocks.names[1])
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
