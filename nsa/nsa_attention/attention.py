"""The Native Sparse Attention layer (arXiv 2502.11089): a gated sum of three attention branches.

Dimensions: B batch, T tokens, M model width, H query heads, G groups of query heads that share keys and values, S
compressed blocks, l tokens of a compressed block, D key width, E value width, n selected blocks per query, p pairs of
dimensions that rotary embeddings rotate together (D/2).

Several `forward` methods share these parameters: `cos_sin` are the rotary cosines and sines, [2, T, p]. `layout`
describes packed documents. The batch is then one row, and documents do not attend to each other. `products` are the
results of the key and value projections, if `project_together` has computed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import Branch, Compression, Implementation, NSAConfig
from .ops.dispatch import (
    UsedImplementation,
    implementation_for,
    implementation_for_select_and_mix,
    implementation_for_selected,
    implementation_for_sliding,
    require_implementation,
)
from .ops.packed import PackedLayout
from .ops.rotary import is_eager_on_cpu, rotate_by_tiles
from .ops.selection import Selection


class NSAttention(nn.Module):
    """The Native Sparse Attention layer, which sums its attention branches weighted by learned gates.

    It computes o = sum over branches c of gate_c * attention(q, K_c, V_c) (NSA paper, eq. 5). Raises
    MissingImplementationError if no branch of the layer would use `implementation`.
    """

    def __init__(self, config: NSAConfig, implementation: Implementation = Implementation.AUTO) -> None:
        super().__init__()
        require_implementation(implementation, config)
        self.config, self.implementation = config, implementation
        self.q_proj = Projection(config.dim, config.heads * config.d_k)
        if Branch.CMP in config.branches:
            self.cmp = CompressedBranch(config, implementation)
        if Branch.SEL in config.branches:
            self.sel = SelectedBranch(config, implementation)
        if Branch.WIN in config.branches:
            self.win = SlidingBranch(config, implementation)
        self.gate_mlp = GateMLP(config)
        # With stopped gradients the gate weights are frozen: otherwise DDP would wait for gradients that never arrive.
        self.gate_mlp.requires_grad_(not config.stop_gradient_gates)
        self.out_proj = nn.Linear(config.heads * config.d_v, config.dim, bias=False)

    def forward(
        self, x_BTM: Tensor, cos_sin: Tensor, memo_number: Tensor | None = None, layout: PackedLayout | None = None
    ) -> Tensor:
        """Return the output of the layer, shape [B, T, M].

        `memo_number` identifies the SelectionMemo of a layer with gradient checkpointing.
        """
        branches = [getattr(self, branch.value) for branch in self.config.branches]
        query_product, *branch_products = project_together(
            x_BTM, [[self.q_proj], *([b.k_proj, b.v_proj] for b in branches)]
        )
        products_by_branch = dict(zip(self.config.branches, branch_products, strict=True))
        q_BHTD = rotate(split_heads(self.q_proj(x_BTM, *query_product), self.config.heads), cos_sin)
        outputs, scorer = [], None
        if Branch.CMP in self.config.branches:
            output, scorer = self.cmp(x_BTM, q_BHTD, cos_sin, layout, products_by_branch[Branch.CMP])
            outputs.append(output)
        if Branch.SEL in self.config.branches:
            outputs.append(
                self.sel(x_BTM, q_BHTD, cos_sin, scorer, memo_number, layout, products_by_branch[Branch.SEL])
            )
        if Branch.WIN in self.config.branches:
            outputs.append(self.win(x_BTM, q_BHTD, cos_sin, layout, products_by_branch[Branch.WIN]))
        return self.mix(x_BTM, outputs)

    def mix(self, x_BTM: Tensor, outputs: list[Tensor]) -> Tensor:
        """Sum the branch outputs [B, H, T, E], weighted by the gates, and project the sum to [B, T, M]."""
        backend, used = implementation_for_select_and_mix(self.implementation, outputs[0], outputs[0], outputs[0])
        count_run(self.gate_mlp.runs, used)
        return self.out_proj(backend.mix(outputs, self.gates(x_BTM)).flatten(2))

    def gates(self, x_BTM: Tensor) -> Tensor:
        """Return the gate of each branch and head, between 0 and 1, shape [branches, B, H, T]."""
        return self.gate_mlp(x_BTM.detach() if self.config.stop_gradient_gates else x_BTM).squeeze(-1)


class Projection(nn.Linear):
    """A linear layer without bias whose output can be computed in advance.

    The product still passes through `forward`, so that forward hooks see it.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x_BTM: Tensor, product: Tensor | None = None) -> Tensor:
        return super().forward(x_BTM) if product is None else product


Products = Sequence[Tensor | None]  # results of projections; None: the projection computes its own


def project_together(x_BTM: Tensor, projections: Sequence[Sequence[Projection]]) -> list[Products]:
    """Apply several projections to the same input. On a CPU, a single matrix product computes them all.

    The results have the nesting of `projections`. On other devices they are all None, and each projection later
    computes its own. The weights stay separate parameters, because they are named, sharded and saved separately.
    """
    if x_BTM.device.type != "cpu":
        return [[None] * len(group) for group in projections]
    flat = [projection for group in projections for projection in group]
    product = functional.linear(x_BTM, torch.cat([projection.weight for projection in flat]))
    parts = iter(product.split([projection.out_features for projection in flat], -1))
    return [[next(parts) for _ in group] for group in projections]


class GateMLP(nn.Linear):
    """An MLP that computes one sigmoid gate per attention branch and head.

    The class itself is the last linear layer, so its parameters are named `gate_mlp.weight` and `gate_mlp.bias`.
    """

    def __init__(self, config: NSAConfig) -> None:
        hidden = max(16, config.dim // 8)
        super().__init__(hidden, len(config.branches) * config.heads)
        self.heads = config.heads
        self.runs: Counter[UsedImplementation] = Counter()
        self.hidden = nn.Linear(config.dim, hidden)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """Return the gates, between 0 and 1, shape [branches, B, H, T, 1]."""
        logits = super().forward(functional.silu(self.hidden(x_BTM)))
        return torch.sigmoid(logits).unflatten(-1, (-1, self.heads)).permute(2, 0, 3, 1).unsqueeze(-1)


class BlockMean(nn.Module):
    """A module that compresses each block of tokens to the mean of its vectors."""

    def __init__(self, config: NSAConfig, _width: int) -> None:
        super().__init__()
        self.length, self.stride = config.block_len, config.block_stride

    def forward(self, x_BGTD: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return one compressed vector per complete block, shape [B, G, S, D]."""
        return self.compress(split_into_blocks(x_BGTD, self.length, self.stride, layout))

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        """Return one compressed vector per block, shape [B, G, S, D]."""
        return blocks_BGSlD.mean(3)


class BlockMLP(BlockMean):
    """A module that compresses each block of tokens with an MLP and a learned position embedding, as in the NSA
    paper.
    """

    # Names of the two linear layers. They differ per method, so weights of one method never load into another.
    names = ("hidden", "out")

    def __init__(self, config: NSAConfig, width: int) -> None:
        super().__init__(config, width)
        self.position = nn.Parameter(torch.randn(self.length, width) * 0.02)
        first, second = self.names
        self.add_module(first, nn.Linear(self.length * width, width))
        self.add_module(second, nn.Linear(width, width))

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return second(functional.gelu(first((blocks_BGSlD + self.position).flatten(3))))


class BlockMeanMLP(BlockMLP):
    """A module that compresses each block of tokens to the mean of its vectors plus the output of an MLP."""

    names = ("inner", "outer")

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        return blocks_BGSlD.mean(3) + super().compress(blocks_BGSlD)


PHI = {Compression.MLP: BlockMLP, Compression.MEAN: BlockMean, Compression.MEAN_MLP: BlockMeanMLP}


class CompressedBranch(nn.Module):
    """The attention branch that attends to compressed blocks of tokens."""

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)
        phi = PHI[config.compression]
        self.k_blocks, self.v_blocks = phi(config, config.d_k), phi(config, config.d_v)

    def forward(
        self,
        x_BTM: Tensor,
        q_BHTD: Tensor,
        cos_sin: Tensor,
        layout: PackedLayout | None = None,
        products: Products = (None, None),
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the attention output [B, H, T, E] and the tensors needed to select blocks.

        These are the compressed keys [B, G, S, D] and the log-sum-exp of their scores [B, H, T].
        """
        config = self.config
        k_BGTD, v_BGTE = keys_and_values(self, x_BTM, products)
        k_BGSD = rotate_blocks(self.k_blocks(k_BGTD, layout), cos_sin, config, layout)
        v_BGSE = self.v_blocks(v_BGTE, layout)
        backend, used = implementation_for(self.implementation, q_BHTD, k_BGSD, v_BGSE)
        count_run(self.runs, used)
        lengths = {"block_len": config.block_len, "block_stride": config.block_stride}
        starts = layout and layout.starts
        output, lse_BHT = backend.attend_compressed(
            q_BHTD, k_BGSD, v_BGSE, **lengths, scale=config.scale, starts=starts
        )
        return output, (k_BGSD, lse_BHT)


class BlockSelector(nn.Module):
    """A module that selects the blocks of tokens that each query attends to.

    It has no parameters. It is a module so that forward hooks can observe the selected indices.
    """

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.implementation = implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.positions_T: Tensor | None = None  # positions of the latest packed queries within their documents
        self.selection = selection_from(config)

    def forward(
        self,
        q_BHTD: Tensor,
        keys_BGSD: Tensor,
        lse_BHT: Tensor | None,
        memo_number: Tensor | None,
        layout: PackedLayout | None = None,
    ) -> Tensor:
        """Return the indices of the selected blocks, int32, shape [B, G, T, n].

        `keys_BGSD` are the compressed keys, `lse_BHT` the log-sum-exp of the queries' scores over them. If `lse_BHT` is
        None, the implementation computes it if needed. `memo_number` identifies the SelectionMemo, if there is one.
        """
        if layout is not None:
            self.positions_T = layout.positions_T
        backend, used = implementation_for_select_and_mix(self.implementation, q_BHTD, keys_BGSD, keys_BGSD)
        count_run(self.runs, used)
        return backend.select(q_BHTD, keys_BGSD, lse_BHT, self.selection, memo_number, layout and layout.starts)


class SelectedBranch(nn.Module):
    """The attention branch that attends to the tokens of the selected blocks."""

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)
        self.chooser = BlockSelector(config, implementation)

    def forward(
        self,
        x_BTM: Tensor,
        q_BHTD: Tensor,
        cos_sin: Tensor,
        scorer: tuple[Tensor, Tensor] | None,
        memo_number: Tensor | None,
        layout: PackedLayout | None = None,
        products: Products = (None, None),
    ) -> Tensor:
        """Return the attention output, shape [B, H, T, E].

        `scorer` is the second result of CompressedBranch.forward and ranks the blocks. If it is None, because the layer
        has no compressed branch, blocks are ranked by the mean of this branch's own keys.
        """
        config = self.config
        k_BGTD, v_BGTE = keys_and_values(self, x_BTM, products)
        if scorer is None:
            # A separate scorer could not be trained, because the selection has no gradient.
            means = split_into_blocks(k_BGTD, config.block_len, config.block_stride, layout).mean(3)
            keys_BGSD, lse_BHT = rotate_blocks(means, cos_sin, config, layout), None
        else:
            keys_BGSD, lse_BHT = scorer
        indices = self.chooser(q_BHTD.detach(), keys_BGSD.detach(), lse_BHT, memo_number, layout)
        k_BGTD = rotate(k_BGTD, cos_sin)
        places, select_len = config.select_count, config.select_len
        starts, longest = (layout.starts, layout.longest) if layout else (None, None)
        backend, used = implementation_for_selected(
            self.implementation, q_BHTD, k_BGTD, v_BGTE, places, select_len, longest
        )
        count_run(self.runs, used)
        output, _ = backend.attend_selected(
            q_BHTD, k_BGTD, v_BGTE, indices, select_len=select_len, scale=config.scale, starts=starts
        )
        return output


class SlidingBranch(nn.Module):
    """The attention branch that attends to a sliding window of the most recent tokens."""

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)

    def forward(
        self,
        x_BTM: Tensor,
        q_BHTD: Tensor,
        cos_sin: Tensor,
        layout: PackedLayout | None = None,
        products: Products = (None, None),
    ) -> Tensor:
        """Return the attention output, shape [B, H, T, E]."""
        k_BGTD, v_BGTE = keys_and_values(self, x_BTM, products)
        k_BGTD = rotate(k_BGTD, cos_sin)
        backend, used = implementation_for_sliding(self.implementation, q_BHTD, k_BGTD, v_BGTE)
        count_run(self.runs, used)
        starts, window = layout and layout.starts, self.config.window
        output, _ = backend.attend_sliding(
            q_BHTD, k_BGTD, v_BGTE, window=window, scale=self.config.scale, starts=starts
        )
        return output


def keys_and_values(
    branch: CompressedBranch | SelectedBranch | SlidingBranch | VanillaAttention, x_BTM: Tensor, products: Products
) -> tuple[Tensor, Tensor]:
    """Return the keys [B, G, T, D] and values [B, G, T, E] of an attention branch, before rotary embeddings."""
    # The values are copied, so that saving them for the backward pass does not keep the joint projection result alive.
    k_product, v_product = products
    k_BGTD = split_heads(branch.k_proj(x_BTM, k_product), branch.config.groups)
    return k_BGTD, split_heads(branch.v_proj(x_BTM, v_product).contiguous(), branch.config.groups)


def count_run(runs: Counter[UsedImplementation], used: UsedImplementation) -> None:
    """Count one use of an attention implementation in `runs`, except in compiled code, which is traced only once."""
    if not torch.compiler.is_compiling():
        runs[used] += 1


class VanillaAttention(nn.Module):
    """A dense causal attention layer, used as the baseline for comparisons with NSAttention."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = Projection(config.dim, config.heads * config.d_k)
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)
        self.out_proj = nn.Linear(config.heads * config.d_v, config.dim, bias=False)

    def forward(
        self, x_BTM: Tensor, cos_sin: Tensor, _memo_number: Tensor | None = None, layout: PackedLayout | None = None
    ) -> Tensor:
        """Return the output of the layer, shape [B, T, M]."""
        query_product, kv_products = project_together(x_BTM, [[self.q_proj], [self.k_proj, self.v_proj]])
        q_BHTD = rotate(split_heads(self.q_proj(x_BTM, *query_product), self.config.heads), cos_sin)
        k_BGTD, v_BGTE = keys_and_values(self, x_BTM, kv_products)
        k_BGTD = rotate(k_BGTD, cos_sin)
        lengths = layout.lengths if layout else (x_BTM.shape[1],)
        outputs = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*(tensor.split(lengths, 2) for tensor in (q_BHTD, k_BGTD, v_BGTE)), strict=True)
        ]
        output = outputs[0] if layout is None else torch.cat(outputs, 2)
        return self.out_proj(output.transpose(1, 2).flatten(2))


def split_heads(x_BTM: Tensor, heads: int) -> Tensor:
    """Return a view of `x_BTM` with shape [B, heads, T, M / heads]."""
    return x_BTM.unflatten(-1, (heads, -1)).transpose(1, 2)


def split_into_blocks(x_BGTD: Tensor, length: int, stride: int, layout: PackedLayout | None = None) -> Tensor:
    """Return the complete blocks of `length` tokens that begin every `stride` tokens, shape [B, G, S, l, D].

    The result is a view, except for packed documents, whose blocks lie within one document.
    """
    if layout is not None:
        return x_BGTD.index_select(2, layout.blocks_Sl.flatten()).unflatten(2, (-1, length))
    if x_BGTD.shape[2] < length:
        # Even without a block the result stays connected to the graph: the projections get zero gradients, not None.
        return x_BGTD[:, :, :0, None].expand(-1, -1, -1, length, -1)
    return x_BGTD.unfold(2, length, stride).transpose(3, 4)


def rotate_blocks(k_BGSD: Tensor, cos_sin: Tensor, config: NSAConfig, layout: PackedLayout | None = None) -> Tensor:
    """Return the compressed keys with rotary embeddings applied, shape [B, G, S, D]."""
    # Each key is rotated to the position of its block's last token, the first query that attends to it.
    if layout is not None:
        return rotate(k_BGSD, cos_sin[:, layout.blocks_Sl[:, -1]])
    return rotate(k_BGSD, cos_sin[:, config.block_len - 1 :: config.block_stride])


def selection_from(config: NSAConfig) -> Selection:
    """Return the parameters of block selection that a model configuration defines."""
    return Selection(
        block_len=config.block_len,
        block_stride=config.block_stride,
        select_len=config.select_len,
        select_count=config.select_count,
        scale=config.scale,
    )


ROTARY_BASE = 10000.0


def rotary_frequencies(width: int) -> Tensor:
    """Return the rotary angle per token for each pair of dimensions, in radians, shape [D/2]."""
    return torch.as_tensor(
        ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), dtype=torch.float32
    )


def rotary_cos_sin(frequencies: Tensor, tokens: int) -> Tensor:
    """Return the cosines and sines of the rotary angles at positions 0 to T - 1, shape [2, T, D/2]."""
    positions = torch.arange(tokens, device=frequencies.device, dtype=frequencies.dtype)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


class RotaryTable:
    """A cache of rotary cosines and sines that grows with the highest position requested."""

    def __init__(self) -> None:
        self._cos_sin: Tensor | None = None  # None until the first call, which provides the frequencies

    def __call__(self, frequencies: Tensor, end: int) -> Tensor:
        """Return the rotary cosines and sines of at least the first `end` positions, shape [2, positions, D/2]."""
        if self._cos_sin is None or end > self._cos_sin.shape[1]:
            self._cos_sin = rotary_cos_sin(frequencies, max(64, 1 << (end - 1).bit_length()))
        return self._cos_sin


def rotate(x_BHTD: Tensor, cos_sin_2Tp: Tensor) -> Tensor:
    """Apply rotary embeddings to `x_BHTD`.

    The pairs (i, i + D/2) of row t are rotated by the angles of cos_sin[:, t]. The result has the dtype of `x_BHTD`.
    """
    if is_eager_on_cpu(x_BHTD):
        return rotate_by_tiles(x_BHTD, cos_sin_2Tp)
    cosine, sine = cos_sin_2Tp.to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
