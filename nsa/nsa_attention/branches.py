"""The attention branches of an NSA layer, and the gates of their outputs.

Dimensions: B batch, T tokens, M model width, H query heads, G groups of query heads that share keys and values, S
compressed blocks, D key width, E value width, n selected blocks per query, p pairs of dimensions that rotary embeddings
rotate together (D/2).
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .compression import PHI, block_angles, split_into_blocks
from .config import Implementation, LayerConfig
from .ops.dispatch import (
    UsedImplementation,
    count_run,
    implementation_for,
    implementation_for_select,
    implementation_for_selected,
    implementation_for_sliding,
)
from .ops.packed import PackedLayout
from .ops.recompute import Origin, linear, origin_of, project_heads
from .ops.rotary import rotate
from .ops.selection import Selection
from .projections import Projected, Projection, TokenContext

Pair = tuple[Tensor, Tensor]  # the keys and values of a branch
# With fewer query heads per group, the keys and values of the sliding branch take more memory than computing them again
# in the backward pass is worth: with one head per group, that of two outputs of the layer.
MIN_SAVED_HEADS = 4


class GateMLP(nn.Linear):
    """An MLP that computes one sigmoid gate per attention branch and head.

    The class itself is the last linear layer, so its parameters are named `gate_mlp.weight` and `gate_mlp.bias`.
    """

    def __init__(self, config: LayerConfig) -> None:
        hidden = max(16, config.dim // 8)
        super().__init__(hidden, len(config.branches) * config.heads)
        self.heads = config.heads
        self.runs: Counter[UsedImplementation] = Counter()
        self.hidden = nn.Linear(config.dim, hidden)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """Return the gates, between 0 and 1, shape [branches, B, H, T, 1]."""
        hidden = self.hidden(x_BTM)
        active = functional.silu(hidden)
        logits = linear(active, [self.weight], self.bias, origin_of(active, functional.silu, hidden))
        return torch.sigmoid(logits).unflatten(-1, (-1, self.heads)).permute(2, 0, 3, 1).unsqueeze(-1)


class AttentionBranch(nn.Module):
    """The base class of the attention branches, with their projections of keys and values.

    Calling a branch computes its attention output from given queries, keys and values.
    """

    def __init__(self, config: LayerConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)

    def prepare(self, projected: Projected, _context: TokenContext) -> Pair:
        """Return the keys and values that queries attend to, from the projected ones. The keys are not yet rotated."""
        return projected.keys_BGTD, projected.values_BGTE

    def angles(self, context: TokenContext) -> Tensor:
        """Return the rotary cosines and sines of the keys that queries attend to, [2, (B,) T or S, p]."""
        return context.cos_sin


class CompressedBranch(AttentionBranch):
    """The attention branch that attends to compressed blocks of tokens."""

    def __init__(self, config: LayerConfig, implementation: Implementation) -> None:
        super().__init__(config, implementation)
        phi = PHI[config.compression]
        self.k_blocks, self.v_blocks = phi(config, config.d_k), phi(config, config.d_v)

    def prepare(self, projected: Projected, context: TokenContext) -> Pair:
        k_BGTD, v_BGTE, x_BTM = projected
        layout = context.layout
        origins: list[Origin | None] = [None, None]
        if x_BTM is not None:
            project = partial(project_heads, groups=self.config.groups)
            origins = [
                origin_of(heads, project, x_BTM, projection.weight)
                for heads, projection in ((k_BGTD, self.k_proj), (v_BGTE, self.v_proj))
            ]
        return self.k_blocks(k_BGTD, layout, origins[0]), self.v_blocks(v_BGTE, layout, origins[1])

    def angles(self, context: TokenContext) -> Tensor:
        return block_angles(context.cos_sin, self.config, context.layout)

    def forward(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, layout: PackedLayout | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output [B, H, T, E] and the log-sum-exp [B, H, T] of the scores."""
        config = self.config
        backend, used = implementation_for(self.implementation, q_BHTD, k_BGSD, v_BGSE)
        count_run(self.runs, used)
        lengths = {"block_len": config.block_len, "block_stride": config.block_stride}
        starts = layout and layout.starts
        return backend.attend_compressed(q_BHTD, k_BGSD, v_BGSE, **lengths, scale=config.scale, starts=starts)


class BlockSelector(nn.Module):
    """A module that selects the blocks of tokens that each query attends to.

    It has no parameters. It is a module so that forward hooks can observe the selected indices, or select others.
    """

    def __init__(self, config: LayerConfig, implementation: Implementation) -> None:
        super().__init__()
        self.implementation = implementation
        self.runs: Counter[UsedImplementation] = Counter()
        self.positions_T: Tensor | None = None  # positions of the latest packed queries within their documents
        self.selection = Selection.of(config)

    def forward(
        self,
        q_BHTD: Tensor,
        keys_BGSD: Tensor,
        lse_BHT: Tensor | None,
        memo_number: Tensor | None,
        layout: PackedLayout | None = None,
        indices_BGTn: Tensor | None = None,
    ) -> Tensor:
        """Return the indices of the selected blocks, int32, shape [B, G, T, n].

        `keys_BGSD` are the compressed keys, `lse_BHT` the log-sum-exp of the queries' scores over them. If `lse_BHT` is
        None, the implementation computes it if needed. `memo_number` identifies the SelectionMemo, if there is one.
        `indices_BGTn` are the indices if an operator has already selected the blocks; otherwise None.
        """
        if layout is not None:
            self.positions_T = layout.positions_T
        if indices_BGTn is not None:
            return indices_BGTn
        backend, used = implementation_for_select(self.implementation, q_BHTD, keys_BGSD, keys_BGSD)
        count_run(self.runs, used)
        return backend.select(q_BHTD, keys_BGSD, lse_BHT, self.selection, memo_number, layout and layout.starts)


class SelectedBranch(AttentionBranch):
    """The attention branch that attends to the tokens of the selected blocks."""

    def __init__(self, config: LayerConfig, implementation: Implementation) -> None:
        super().__init__(config, implementation)
        self.chooser = BlockSelector(config, implementation)

    def block_means(self, k_BGTD: Tensor, context: TokenContext) -> Tensor:
        """Return keys [B, G, S, D] that rank the blocks of a layer without a compressed branch: means of `k_BGTD`."""
        # Separate keys could not be trained, because the selection has no gradient.
        config = self.config
        index = () if context.layout is None else (context.layout.blocks_Sl,)
        means = split_into_blocks(k_BGTD, *index, length=config.block_len, stride=config.block_stride).mean(3)
        return rotate(means, block_angles(context.cos_sin, config, context.layout), self.implementation)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTE: Tensor,
        ranking_keys_BGSD: Tensor,
        lse_BHT: Tensor | None,
        memo_number: Tensor | None = None,
        layout: PackedLayout | None = None,
    ) -> Tensor:
        """Return the attention output, shape [B, H, T, E].

        `ranking_keys_BGSD` and `lse_BHT` rank the blocks: the keys of the compressed branch and the log-sum-exp of
        their scores, or the result of `block_means` and None.
        """
        indices = self.chooser(q_BHTD.detach(), ranking_keys_BGSD.detach(), lse_BHT, memo_number, layout)
        places, select_len = self.config.select_count, self.config.select_len
        starts, longest = (layout.starts, layout.longest) if layout else (None, None)
        backend, used = implementation_for_selected(
            self.implementation, q_BHTD, k_BGTD, v_BGTE, places, select_len, longest
        )
        count_run(self.runs, used)
        output, _ = backend.attend_selected(
            q_BHTD, k_BGTD, v_BGTE, indices, select_len=select_len, scale=self.config.scale, starts=starts
        )
        return output


class SlidingBranch(AttentionBranch):
    """The attention branch that attends to a sliding window of the most recent tokens."""

    def sources(self, x_BTM: Tensor | None, context: TokenContext) -> list[Tensor]:
        """Return what the backward pass computes the keys and values from. Empty: the keys and values are saved.

        `x_BTM` is the input of their projections (`Projected.x_BTM`).
        """
        config = self.config
        if config.heads >= MIN_SAVED_HEADS * config.groups or x_BTM is None or torch.compiler.is_compiling():
            return []
        return [tensor.detach() for tensor in (x_BTM, self.k_proj.weight, self.v_proj.weight, context.cos_sin)]

    def forward(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return the attention output, shape [B, H, T, E]."""
        backend, used = implementation_for_sliding(self.implementation, q_BHTD, k_BGTD, v_BGTE)
        count_run(self.runs, used)
        starts, window = layout and layout.starts, self.config.window
        output, _ = backend.attend_sliding(
            q_BHTD, k_BGTD, v_BGTE, window=window, scale=self.config.scale, starts=starts
        )
        return output
