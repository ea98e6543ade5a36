"""The Native Sparse Attention layer (arXiv 2502.11089): a gated sum of three attention branches.

Dimensions: B batch, T tokens, M model width, H query heads, G groups of query heads that share keys and values, D key
width, E value width, I width of all heads (H x E), n selected blocks per query, p pairs of dimensions that rotary
embeddings rotate together (D/2).

`cos_sin` are the rotary cosines and sines of the tokens, [2, T, p], or [2, B, T, p] if sequences have different
positions. `layout` describes packed documents: the batch is then one row, and documents do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .branches import AttentionBranch, CompressedBranch, GateMLP, Pair, SelectedBranch, SlidingBranch
from .config import ALL_BRANCHES, Branch, Compression, Implementation, LayerConfig, layer_mistakes
from .kv_cache import KVCache, attend_with_cache, new_cache
from .ops.dispatch import (
    PLAIN_SUM,
    combined_operator,
    count_run,
    require_implementation,
)
from .ops.input_validation import cu_seqlens_form_problems, cu_seqlens_value_problems
from .ops.mixing import gated_sum
from .ops.packed import PackedLayout, packed_layout
from .ops.recompute import RecomputingLinear, call_linear, in_autocast_dtype, origin_of
from .ops.rotary import cos_sin_at, rotary_frequencies, rotate_queries_and_keys
from .ops.selection import Selection
from .ops.table_cache import cached_table
from .projections import (
    Projected,
    Projection,
    TokenContext,
    call_projection,
    keys_and_values,
    project_together,
    split_heads,
)

# The names that NSAttention has for fields of LayerConfig.
_ARGUMENTS = {
    "groups": "kv_heads",
    "d_k": "head_dim",
    "d_v": "v_head_dim",
    "block_len": "compress_size",
    "block_stride": "compress_stride",
    "select_len": "block_size",
    "select_count": "block_count",
}


class NSAttention(nn.Module):
    """A causal self-attention layer with Native Sparse Attention, to use in place of a dense attention layer.

    The output of token t is W_o o_t, with o_t = sum over c of g_t^c * softmax(q_t K_c^T * scale) V_c (NSA paper, eq.
    5). The branches c attend to compressed blocks of tokens (eq. 7), to the blocks with the highest scores in the
    compressed branch (eq. 8 to 12), and to a sliding window. Each branch has its own keys and values. The gates g are
    between 0 and 1, per token and head, computed from the token by an MLP. The layer applies rotary embeddings to
    queries and keys. It has no dropout, and no biases in its projections. Memory grows linearly with T.

    Forward hooks see gates [3, B, H, T, 1] at `gate_mlp` and block indices [B, G, T, n] at `sel.chooser`. A hook on
    `cmp`, `sel` or `win` sees the output of that branch; on a GPU each branch then has an operator of its own, which is
    slower and takes more memory.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        block_size: int = 64,
        block_count: int = 16,
        compress_size: int = 32,
        compress_stride: int = 16,
        window: int = 512,
        compression: Compression | str = Compression.MLP,
        rope_base: float = 10000.0,
        scale: float | None = None,
        implementation: Implementation | str = Implementation.AUTO,
        deterministic: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a layer with newly initialized weights on `device` in `dtype`, by default those of torch.

        `dim` is the width of inputs and outputs. `heads / kv_heads` query heads share one head of keys and values.
        `head_dim` is the width of a query and key head, by default dim / heads, and `v_head_dim` that of a value head,
        by default `head_dim`. The following lengths are in tokens. In the selected branch a token attends to
        `block_count` blocks of `block_size`; the first block, the token's own block and the one before it are always
        among them. In the compressed branch a block of `compress_size` starts every `compress_stride`. `window` is the
        length of the sliding window, including the token itself.

        `compression` computes the key and value of a block: "mlp" as in the paper, "mean", or "mean_mlp". `rope_base`
        is the base of the rotary frequencies. `scale` is the factor of the scores, by default 1 / sqrt(head_dim).
        `implementation` is a value of `Implementation`, such as "eager" or "triton"; "auto" takes the fastest. With
        `deterministic=False`, the backward pass of the Triton kernels may add with atomics, as in `nsa_func`; separate
        operators for the branches never do.

        Raises ValueError that lists every invalid argument, and MissingImplementationError if no branch would use
        `implementation`.
        """
        super().__init__()
        mistakes: list[str] = []
        if head_dim is None:
            if heads >= 1 and dim % heads:
                mistakes.append(f"head_dim: must be given, because heads ({heads}) do not divide dim ({dim})")
            head_dim = max(2, dim // max(1, heads)) if mistakes else dim // max(1, heads)
        config = LayerConfig(
            dim=dim,
            heads=heads,
            groups=kv_heads,
            d_k=head_dim,
            d_v=head_dim if v_head_dim is None else v_head_dim,
            block_len=compress_size,
            block_stride=compress_stride,
            select_len=block_size,
            select_count=block_count,
            window=window,
            compression=_member(Compression, "compression", compression, mistakes),
            rope_base=rope_base,
            softmax_scale=scale,
        )
        requested = _member(Implementation, "implementation", implementation, mistakes)
        mistakes += layer_mistakes(config, _ARGUMENTS)
        if 1 <= compress_stride <= compress_size and compress_size % compress_stride:
            mistakes.append(
                f"compress_size: expected a multiple of compress_stride ({compress_stride}), got {compress_size}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            mistakes.append(f"dtype: expected a floating-point dtype, got {dtype}")
        if mistakes:
            raise ValueError(f"NSAttention: {'; '.join(mistakes)}")
        with nullcontext() if device is None else torch.device(device):
            self._build(config, requested, deterministic)
        self.to(dtype=dtype)

    @classmethod
    def from_config(
        cls, config: LayerConfig, implementation: Implementation = Implementation.AUTO, *, deterministic: bool = True
    ) -> NSAttention:
        """Return the layer that `config` describes. It may have fewer than three branches.

        Raises MissingImplementationError if no branch of the layer would use `implementation`.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._build(config, implementation, deterministic)
        return layer

    def _build(self, config: LayerConfig, implementation: Implementation, deterministic: bool) -> None:
        require_implementation(implementation, config)
        self.config, self.implementation, self.deterministic = config, implementation, deterministic
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
        self.out_proj = RecomputingLinear(config.heads * config.d_v, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        context: TokenContext | None = None,
    ) -> Tensor:
        """Return the output of the layer, shape [B, T, dim], for tokens `x` of shape [B, T, dim].

        A token attends to itself and to earlier tokens of its row. `positions` (integers [T] or [B, T]) are the
        positions for the rotary embeddings, by default 0 to T - 1; they do not change which tokens are attended to.
        `cu_seqlens` (int32 [sequences + 1] from 0 to T, batch 1) packs several sequences into one row: they do not
        attend to each other, and default positions start from 0 in each sequence. On a GPU, a new `cu_seqlens` is read
        by the host once, which waits for the device.

        With a `cache` of `new_cache`, the tokens continue its sequences and are appended to it. They attend to all
        tokens of their sequence, and have the positions after those. `positions` and `cu_seqlens` must then be None.

        `context` is for models that compute the facts about the tokens once for all layers, instead of the arguments
        above. Raises ValueError that lists every invalid argument, also for tokens that the cache cannot take. Raises
        OutOfPagesError if too few pages are free.
        """
        if cache is not None:
            _check_arguments(self.config.dim, x, positions, cu_seqlens)
            if positions is not None or cu_seqlens is not None:
                raise ValueError(
                    "NSAttention: positions and cu_seqlens: expected None, because the cache has positions"
                )
            return attend_with_cache(self, x, cache)
        if context is None:
            context = self._context(x, positions, cu_seqlens)
        x = in_autocast_dtype(x)  # once for all projections
        context = context._replace(cos_sin=context.cos_sin.to(x.dtype))
        q_BHTD, raw = self.project(x)
        q_BHTD, pairs = self._rotate(q_BHTD, raw, context)
        if Branch.SEL in raw and Branch.CMP not in raw:
            ranking_keys = self.sel.block_means(raw[Branch.SEL].keys_BGTD, context)
        else:
            ranking_keys = pairs[Branch.CMP][0] if Branch.CMP in raw else None
        sources = self.win.sources(raw[Branch.WIN].x_BTM, context) if Branch.WIN in raw else []
        del raw  # with the result of the joint projection, which no later step reads
        if (output_BTM := self._attend_together(x, q_BHTD, pairs, sources, context)) is not None:
            return output_BTM
        outputs: list[Tensor] = []
        layout, lse_BHT = context.layout, None
        for branch, pair in pairs.items():
            if branch is Branch.CMP:
                output, lse_BHT = self.cmp(q_BHTD, *pair, layout)
            elif branch is Branch.SEL:
                output = self.sel(q_BHTD, *pair, ranking_keys, lse_BHT, context.memo_number, layout)
            else:
                output = self.win(q_BHTD, *pair, layout)
            outputs.append(output)
        return self.mix(x, outputs)

    def extra_repr(self) -> str:
        arguments = {name: getattr(self.config, field) for field, name in _ARGUMENTS.items()}
        sizes = {"dim": self.config.dim, "heads": self.config.heads, **arguments, "window": self.config.window}
        return ", ".join(f"{name}={size}" for name, size in sizes.items())

    def branch(self, branch: Branch) -> AttentionBranch:
        """Return the module of an attention branch."""
        part = self.get_submodule(branch.value)
        assert isinstance(part, AttentionBranch)
        return part

    def project(self, x: Tensor) -> tuple[Tensor, dict[Branch, Projected]]:
        """Return the projected queries [B, H, T, D], and each branch's keys and values, before rotary embeddings."""
        parts = {branch: self.branch(branch) for branch in ALL_BRANCHES if branch in self.config.branches}
        (query_product,), *products = project_together(
            x, [[self.q_proj], *([part.k_proj, part.v_proj] for part in parts.values())]
        )
        q_BHTD = split_heads(call_projection(self.q_proj, x, query_product), self.config.heads)
        raw = {
            branch: keys_and_values(part, x, product)
            for (branch, part), product in zip(parts.items(), products, strict=True)
        }
        return q_BHTD, raw

    def _rotate(
        self, q_BHTD: Tensor, raw: Mapping[Branch, Projected], context: TokenContext
    ) -> tuple[Tensor, dict[Branch, Pair]]:
        """Return the rotated queries [B, H, T, D], and the rotated keys and the values that each branch attends to."""
        parts = {branch: self.branch(branch) for branch in raw}
        keys, values = zip(*(part.prepare(raw[branch], context) for branch, part in parts.items()), strict=True)
        # Compressed keys are rotated as whole blocks, so the keys are compressed first.
        tables = [context.cos_sin, *(part.angles(context) for part in parts.values())]
        q_BHTD, *rotated_keys = rotate_queries_and_keys(q_BHTD, keys, tables, self.implementation)
        return q_BHTD, dict(zip(parts, zip(rotated_keys, values, strict=True), strict=True))

    def _attend_together(
        self,
        x: Tensor,
        q_BHTD: Tensor,
        pairs: Mapping[Branch, Pair],
        sliding_sources: Sequence[Tensor],
        context: TokenContext,
    ) -> Tensor | None:
        """Return the output of the layer, computed by one operator for all branches, or None if no operator can."""
        if len(pairs) < len(ALL_BRANCHES) or not x.numel() or self._has_observed_branches():
            return None
        operator = combined_operator(self.implementation, q_BHTD, *pairs.values())
        if operator is None:
            return None
        for part in (self.cmp, self.sel, self.sel.chooser, self.win, self.gate_mlp):
            count_run(part.runs, operator.used)
        gates_cBHT = self.gates(x)
        arguments = (q_BHTD, list(pairs.values()), gates_cBHT, Selection.of(self.config))
        options = {
            "window": self.config.window,
            "starts": context.layout and context.layout.starts,
            "sliding_sources": sliding_sources,
            "deterministic": self.deterministic,
        }
        mixed_BTHE, indices_BGTn, outputs = operator.attend(*arguments, **options, memo_number=context.memo_number)
        keys_BGSD = pairs[Branch.CMP][0]
        shown_BGTn = self.sel.chooser(q_BHTD, keys_BGSD, None, context.memo_number, context.layout, indices_BGTn)
        if shown_BGTn is not indices_BGTn:  # a forward hook of the chooser selects other blocks
            mixed_BTHE, _, outputs = operator.attend(*arguments, **options, indices_BGTn=shown_BGTn)
        return self._project_sum(mixed_BTHE, gates_cBHT, outputs, operator.sum)

    def _has_observed_branches(self) -> bool:
        """Return whether a hook needs the output of a branch, or its gradient."""
        if torch.compiler.is_compiling():  # compiled code runs no hooks that are added to a part of a layer
            return False
        return any(
            part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
            for part in (self.cmp, self.sel, self.win)
        )

    def new_cache(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        shared_with: KVCache | None = None,
    ) -> KVCache:
        """Return an empty KV cache for `batch_size` sequences, for inference with `layer(x, cache=cache)`.

        A sequence has at most `max_tokens` tokens; None: memory grows with the longest sequence. With `pages` or
        `page_size`, keys and values are stored in a pool of `pages` pages of `page_size` rows, and a sequence takes
        only the pages it needs. `page_size` is a multiple of `block_size`, by default one that 16 divides as well;
        `pages` is by default enough for `max_tokens` in every sequence. `shared_with` is the cache of another layer
        that gets the same tokens: both then share the lengths and the page table. Raises ValueError and CannotRunError
        for values that do not go together.
        """
        return new_cache(
            self.config, batch_size, max_tokens=max_tokens, page_size=page_size, pages=pages, shared_with=shared_with
        )

    def mix(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Sum the branch outputs [B, H, T, E], weighted by the gates, and project the sum to [B, T, M]."""
        count_run(self.gate_mlp.runs, PLAIN_SUM)
        gates_cBHT = self.gates(x)
        return self._project_sum(gated_sum(outputs, gates_cBHT), gates_cBHT, outputs, gated_sum)

    def _project_sum(
        self,
        mixed_BTHE: Tensor,
        gates_cBHT: Tensor,
        outputs: Sequence[Tensor],
        sum_outputs: Callable[[Sequence[Tensor], Tensor], Tensor],
    ) -> Tensor:
        """Return the output projection of the gated sum, [B, T, M].

        `sum_outputs` computes the sum again in the backward pass, from the gates and branch outputs, which are saved.
        """
        mixed_BTI = mixed_BTHE.flatten(2)
        origin = origin_of(mixed_BTI, partial(_flat_sum, sum_outputs), gates_cBHT, *outputs)
        return call_linear(self.out_proj, mixed_BTI, origin)

    def gates(self, x: Tensor) -> Tensor:
        """Return the gate of each branch and head, between 0 and 1, shape [branches, B, H, T]."""
        return self.gate_mlp(x.detach() if self.config.stop_gradient_gates else x).squeeze(-1)

    def _context(self, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None) -> TokenContext:
        """Return the facts about the tokens that the arguments of `forward` define."""
        _check_arguments(self.config.dim, x, positions, cu_seqlens)
        config, layout = self.config, None
        if cu_seqlens is not None:
            numbers = (x.shape[1], config.block_len, config.block_stride)
            layout = cached_table(
                cu_seqlens,
                x.device,
                ("layout", *numbers),
                lambda: _layout_from(cu_seqlens.tolist(), *numbers, x.device),
            )
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device) if layout is None else layout.positions_T
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequencies = rotary_frequencies(config.d_k, config.rope_base, x.device).to(dtype)
        return TokenContext(cos_sin_at(frequencies, positions), layout=layout)


def _flat_sum(
    sum_outputs: Callable[[Sequence[Tensor], Tensor], Tensor], gates_cBHT: Tensor, *outputs: Tensor
) -> Tensor:
    return sum_outputs(outputs, gates_cBHT).flatten(2)


def _member(kind: type[Compression] | type[Implementation], name: str, value: str, mistakes: list[str]) -> Any:
    """Return the enum member with this value. If there is none, add a message and return the first member."""
    if value in list(kind):
        return kind(value)
    mistakes.append(f"{name}: expected {', '.join(kind)}, got {value!r}")
    return next(iter(kind))


def _layout_from(
    starts: list[int], tokens: int, block_len: int, block_stride: int, device: torch.device
) -> PackedLayout:
    if problems := cu_seqlens_value_problems(starts, tokens):
        raise ValueError(f"NSAttention: {'; '.join(problems)}")
    return packed_layout([stop - start for start, stop in pairwise(starts)], block_len, block_stride, device)


def _check_arguments(dim: int, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError that lists every invalid argument of a layer with inputs of width `dim`."""
    if x.dim() != 3 or x.shape[2] != dim or not x.is_floating_point():
        raise ValueError(f"NSAttention: x: expected floats [B, T, {dim}], got {x.dtype} {list(x.shape)}")
    batch, tokens, _ = x.shape
    mistakes = []
    if positions is not None:
        if positions.shape not in ((tokens,), (batch, tokens)):
            mistakes.append(f"positions: expected [{tokens}] or [{batch}, {tokens}], got {list(positions.shape)}")
        if positions.is_floating_point() or positions.dtype is torch.bool:
            mistakes.append(f"positions: expected integers, got {positions.dtype}")
        if positions.device != x.device:
            mistakes.append(f"positions: expected {x.device} as x, got {positions.device}")
    if cu_seqlens is not None:
        mistakes += cu_seqlens_form_problems(cu_seqlens, x, "x")
    if mistakes:
        raise ValueError(f"NSAttention: {'; '.join(mistakes)}")
