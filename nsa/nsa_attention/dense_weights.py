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
    """Copy the projection weights of a dense causal attention layer to `layer`, which then has a similar output.

    `q` [H * D, M], `k` [G * D, M], `v` [G * E, M] and `out` [M, H * E] are weights of linear layers without biases. All
    three branches start with the same keys and values. Create `layer` with the `rope_base` of the dense layer.

    The rotary embeddings of `layer` rotate the dimensions i and i + D / 2 of a head together, as Hugging Face's Llama
    does. If the dense layer rotates 2 * i and 2 * i + 1 together, as in Meta's Llama checkpoints and in torchtitan,
    reorder the rows of its weights for `q` and `k`: `w.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).flatten(0, 2)`.

    At first, the gate of the selected branch is sigmoid(open_gate), and the gates of the other branches are
    sigmoid(-open_gate). With the compression "mean_mlp", the compressed keys are means at first; they rank the blocks.

    The selected branch attends to all earlier tokens, as the dense layer does, as long as a sequence has at most
    block_count * block_size tokens (1024 by default). With random weights (M = 256) and a sequence of 1024 tokens, the
    outputs of the two layers differ by 1.3 % (norm of the difference, relative to the norm of the output) with
    "mean_mlp" and by 4 % with "mlp". With open_gate=8, they differ by 0.02 % and 0.07 %, but the gates learn more
    slowly, because the sigmoid is flatter there. In longer sequences, a token attends only to the blocks with the
    highest scores: with 2048 tokens, the outputs differ by 21 to 22 %.

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
