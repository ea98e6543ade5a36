"""Where the time of a layer goes: seconds of each part of an NSA layer and of its control, forward and backward.

Each part is called by itself, on tensors of the shape it has in the layer, a few times; the median counts. Both layers
have the projections with their rotation, the attention itself, the MLP, and once per model the head with the loss.
NSA's attention is compressing, the three branches, choosing the blocks, and the gates with the mixing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.synthetic_selections import choices
from nsa_attention.attention import (
    GateMLP,
    NSAttention,
    VanillaAttention,
    rotary_cos_sin,
    rotary_frequencies,
    rotate,
    rotate_blocks,
    split_heads,
)
from nsa_attention.config import Attention, Implementation, NSAConfig
from nsa_attention.model import Block
from nsa_attention.ops.dispatch import implementation_for, implementation_for_selected
from nsa_attention.ops.selection import Selection

Run = Callable[..., Tensor]
# Of the head: so many tokens at a time, as the whole step does it.
HEAD_TOKENS = 2048
# Of its blocks that a query has in common with the one before it, in the second look at the selected branch: the blocks
# of random keys, which the first one reads, share little.
SHARED = 0.95


def parts(config: NSAConfig, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """For each kind of layer its parts, each with the seconds of one layer forward and backward."""
    nsa, vanilla = (
        Block(replace(config, attention=kind), Implementation.AUTO).attn for kind in (Attention.NSA, Attention.VANILLA)
    )
    shared = _shared(config, repeats)
    return {
        "nsa": _nsa(nsa, config, repeats) | shared,
        "vanilla": _vanilla(vanilla, config, repeats) | shared,
    }


def _shared(config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    x = _leaf(1, config.seq_len, config.dim)
    mlp = Block(replace(config, attention=Attention.VANILLA), Implementation.AUTO).mlp
    head = nn.Linear(config.dim, config.vocab, bias=False)
    tokens = min(HEAD_TOKENS, config.seq_len)
    target = torch.randint(config.vocab, (tokens,))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x), target)

    pieces = config.seq_len / tokens
    of_piece = _timed(loss, [_leaf(tokens, config.dim)], repeats, head)
    return {"mlp": _timed(mlp, [x], repeats, mlp), "head": {key: pieces * s for key, s in of_piece.items()}}


def _vanilla(layer: nn.Module, config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    assert isinstance(layer, VanillaAttention)
    angles = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
    q, k, v = _operands(config)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    projections = _projections([layer.q_proj, layer.k_proj], [layer.v_proj, layer.out_proj], angles, config)
    return {
        "projections": _timed(projections, [_leaf(1, config.seq_len, config.dim)], repeats, layer),
        "attention": _timed(dense, [q, k, v], repeats),
    }


def _nsa(layer: nn.Module, config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    assert isinstance(layer, NSAttention)
    angles = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
    turned = [layer.q_proj, layer.sel.k_proj, layer.win.k_proj]
    straight = [layer.cmp.k_proj, layer.cmp.v_proj, layer.sel.v_proj, layer.win.v_proj, layer.out_proj]
    q, k, v = _operands(config)

    def compress(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_blocks(layer.cmp.k_blocks(k), angles, config), layer.cmp.v_blocks(v)

    x = _leaf(1, config.seq_len, config.dim)
    blocks = [tensor.detach().requires_grad_() for tensor in compress(k, v)]
    return {
        "projections": _timed(_projections(turned, straight, angles, config), [x], repeats, layer),
        "compress": _timed(lambda *kv: sum(tensor.sum() for tensor in compress(*kv)), [k, v], repeats, layer.cmp),
        **_branches(config, [q, k, v], blocks, repeats),
        "gate": _timed(_mixing(layer.gate_mlp), [x, *_outputs(config)], repeats, layer.gate_mlp),
    }


def _branches(
    config: NSAConfig, dense: list[Tensor], blocks: list[Tensor], repeats: int
) -> dict[str, dict[str, float]]:
    q, k, v = dense
    backend, _ = implementation_for(Implementation.AUTO, q, k, v)
    block = {"block_len": config.block_len, "block_stride": config.block_stride}
    selection = Selection(**block, select_len=config.select_len, select_count=config.select_count, scale=config.scale)
    with torch.no_grad():
        _, lse = backend.attend_compressed(q, *blocks, **block, scale=config.scale)
        indices = backend.select(q, blocks[0], lse, selection)

    def selected_blocks(q: Tensor) -> Tensor:
        return backend.select(q.detach(), blocks[0].detach(), lse, selection)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.attend_compressed(q, k, v, **block, scale=config.scale)[0]

    def selected(indices: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reader, _ = implementation_for_selected(Implementation.AUTO, q, k, v, config.select_count, config.select_len)
        return reader.attend_selected(q, k, v, indices, select_len=config.select_len, scale=config.scale)[0]

    places = {"groups": config.groups, "count": config.select_count, "select_len": config.select_len}
    alike = choices(config.seq_len, **places, shared=SHARED)

    def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.attend_sliding(q, k, v, window=config.window, scale=config.scale)[0]

    return {
        "cmp": _timed(compressed, [q, *blocks], repeats),
        "choose": _timed(selected_blocks, [q], repeats),
        "sel": _timed(partial(selected, indices), dense, repeats),
        f"sel where neighbours share {SHARED:.0%}": _timed(partial(selected, alike), dense, repeats),
        "win": _timed(sliding, dense, repeats),
    }


def _mixing(gate: GateMLP) -> Run:
    def mixed(x: Tensor, *outputs: Tensor) -> Tensor:
        backend, _ = implementation_for(Implementation.AUTO, outputs[0], outputs[0], outputs[0])
        return backend.mix(list(outputs), gate(x).squeeze(-1)).flatten(2)

    return mixed


def _projections(turned: list[nn.Linear], straight: list[nn.Linear], angles: Tensor, config: NSAConfig) -> Run:
    def projected(x: Tensor) -> Tensor:
        heads = [split_heads(linear(x), linear.out_features // config.d_k) for linear in turned]
        results = [rotate(one, angles) for one in heads] + [linear(x) for linear in straight]
        # One number that every result takes part in, at next to no cost.
        return torch.stack([result.flatten()[:: result.numel()].sum() for result in results]).sum()

    return projected


def _timed(run: Run, inputs: Sequence[Tensor], repeats: int, module: nn.Module | None = None) -> dict[str, float]:
    """Median wall and processor seconds, after one call that does not count."""
    leaves = [*inputs, *(module.parameters() if module is not None else ())]
    samples = [_once(run, inputs, leaves) for _ in range(repeats + 1)][1:]
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def _once(run: Run, inputs: Sequence[Tensor], leaves: list[Tensor]) -> dict[str, float]:
    wall, processor = time.perf_counter(), time.process_time()
    output = run(*inputs)
    middle_wall, middle_processor = time.perf_counter(), time.process_time()
    if output.requires_grad:
        torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
    return {
        "forward_wall_s": middle_wall - wall,
        "forward_cpu_s": middle_processor - processor,
        "backward_wall_s": time.perf_counter() - middle_wall,
        "backward_cpu_s": time.process_time() - middle_processor,
    }


def _operands(config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    q = _leaf(1, config.heads, config.seq_len, config.d_k)
    return q, _leaf(1, config.groups, config.seq_len, config.d_k), _leaf(1, config.groups, config.seq_len, config.d_v)


def _outputs(config: NSAConfig) -> list[Tensor]:
    return [_leaf(1, config.heads, config.seq_len, config.d_v) for _ in config.branches]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)
