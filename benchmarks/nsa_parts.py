"""Measure the execution times of the parts of an NSA layer and of a vanilla layer.

Each part runs on its own several times, on tensors with the shapes they have in the layer; the median counts. Both
layers have projections with rotary embeddings, attention, MLP, and (once per model) the head with the loss. The
attention of NSA consists of compression, the three branches, block selection, and the gates with the gated sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.synthetic_selections import make_selections
from nsa_attention.attention import NSAttention
from nsa_attention.branches import GateMLP
from nsa_attention.compression import block_angles
from nsa_attention.config import Attention, Implementation, NSAConfig
from nsa_attention.model import Block
from nsa_attention.ops.dispatch import implementation_for, implementation_for_selected
from nsa_attention.ops.mixing import gated_sum
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies, rotate
from nsa_attention.ops.selection import Selection
from nsa_attention.projections import split_heads
from nsa_attention.vanilla_attention import VanillaAttention

Run = Callable[..., Tensor]
# Tokens that the head processes at a time, as in the full step.
HEAD_TOKENS = 2048
# Fraction of blocks that neighbouring queries share in the second measurement of the selected branch. In the first
# measurement, with random keys, they share few blocks.
SHARED = 0.95


def parts(config: NSAConfig, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the forward and backward times, in seconds, of each part of an NSA layer and of a vanilla layer."""
    nsa, vanilla = (
        Block(replace(config, attention=kind), Implementation.AUTO).attn for kind in (Attention.NSA, Attention.VANILLA)
    )
    common = _common_parts(config, repeats)
    return {
        "nsa": _nsa(nsa, config, repeats) | common,
        "vanilla": _vanilla(vanilla, config, repeats) | common,
    }


def _common_parts(config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    x = _leaf(1, config.seq_len, config.dim)
    mlp = Block(replace(config, attention=Attention.VANILLA), Implementation.AUTO).mlp
    head = nn.Linear(config.dim, config.vocab, bias=False)
    tokens = min(HEAD_TOKENS, config.seq_len)
    target = torch.randint(config.vocab, (tokens,))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x), target)

    piece_count = config.seq_len / tokens
    piece_seconds = _median_seconds(loss, [_leaf(tokens, config.dim)], repeats, head)
    return {
        "mlp": _median_seconds(mlp, [x], repeats, mlp),
        "head": {key: piece_count * s for key, s in piece_seconds.items()},
    }


def _vanilla(layer: nn.Module, config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    assert isinstance(layer, VanillaAttention)
    angles = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
    q, k, v = _operands(config)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    projections = _projection_run([layer.q_proj, layer.k_proj], [layer.v_proj, layer.out_proj], angles, config)
    return {
        "projections": _median_seconds(projections, [_leaf(1, config.seq_len, config.dim)], repeats, layer),
        "attention": _median_seconds(dense, [q, k, v], repeats),
    }


def _nsa(layer: nn.Module, config: NSAConfig, repeats: int) -> dict[str, dict[str, float]]:
    assert isinstance(layer, NSAttention)
    angles = rotary_cos_sin(rotary_frequencies(config.d_k), config.seq_len)
    rotary_layers = [layer.q_proj, layer.sel.k_proj, layer.win.k_proj]
    plain_layers = [layer.cmp.k_proj, layer.cmp.v_proj, layer.sel.v_proj, layer.win.v_proj, layer.out_proj]
    q, k, v = _operands(config)

    def compress(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(layer.cmp.k_blocks(k), block_angles(angles, config)), layer.cmp.v_blocks(v)

    x = _leaf(1, config.seq_len, config.dim)
    blocks = [tensor.detach().requires_grad_() for tensor in compress(k, v)]
    return {
        "projections": _median_seconds(
            _projection_run(rotary_layers, plain_layers, angles, config), [x], repeats, layer
        ),
        "compress": _median_seconds(
            lambda *kv: sum(tensor.sum() for tensor in compress(*kv)), [k, v], repeats, layer.cmp
        ),
        **_branches(config, [q, k, v], blocks, repeats),
        "gate": _median_seconds(_gated_sum(layer.gate_mlp), [x, *_outputs(config)], repeats, layer.gate_mlp),
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

    def run_compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.attend_compressed(q, k, v, **block, scale=config.scale)[0]

    def run_selected(indices: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reader, _ = implementation_for_selected(Implementation.AUTO, q, k, v, config.select_count, config.select_len)
        return reader.attend_selected(q, k, v, indices, select_len=config.select_len, scale=config.scale)[0]

    selection_sizes = {"groups": config.groups, "count": config.select_count, "select_len": config.select_len}
    similar_selections = make_selections(config.seq_len, **selection_sizes, shared=SHARED)

    def run_sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.attend_sliding(q, k, v, window=config.window, scale=config.scale)[0]

    return {
        "cmp": _median_seconds(run_compressed, [q, *blocks], repeats),
        "choose": _median_seconds(selected_blocks, [q], repeats),
        "sel": _median_seconds(partial(run_selected, indices), dense, repeats),
        f"sel where neighbours share {SHARED:.0%}": _median_seconds(
            partial(run_selected, similar_selections), dense, repeats
        ),
        "win": _median_seconds(run_sliding, dense, repeats),
    }


def _gated_sum(gate: GateMLP) -> Run:
    def run(x: Tensor, *outputs: Tensor) -> Tensor:
        return gated_sum(outputs, gate(x).squeeze(-1)).flatten(2)

    return run


def _projection_run(
    rotary_layers: list[nn.Linear], plain_layers: list[nn.Linear], angles: Tensor, config: NSAConfig
) -> Run:
    def run(x: Tensor) -> Tensor:
        heads = [split_heads(linear(x), linear.out_features // config.d_k) for linear in rotary_layers]
        results = [rotate(head, angles) for head in heads] + [linear(x) for linear in plain_layers]
        # A scalar that depends on every result and costs almost nothing.
        return torch.stack([result.flatten()[:: result.numel()].sum() for result in results]).sum()

    return run


def _median_seconds(
    run: Run, inputs: Sequence[Tensor], repeats: int, module: nn.Module | None = None
) -> dict[str, float]:
    """Return the median wall and CPU times, in seconds, of the forward and backward pass."""
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
