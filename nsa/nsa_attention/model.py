"""The language model TinyLM on one device.

parallelize.py wraps the model for several ranks.

Dimensions: B batch, T tokens, L tokens of the longest packed document, M model width, V vocabulary, p pairs of
dimensions that rotary embeddings rotate together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .attention import NSAttention
from .config import Attention, Implementation, NSAConfig
from .ops.dispatch import require_implementation
from .ops.packed import PackedLayout, packed_layout
from .ops.rotary import rotary_cos_sin, rotary_frequencies
from .ops.selection import SelectionMemo
from .projections import TokenContext
from .vanilla_attention import VanillaAttention

# PyTorch's default is the epsilon of the dtype: 0.008 in bfloat16, more than the mean square of a new embedding.
NORM_EPSILON = 1e-6


class Recompute(StrEnum):
    """The modes of gradient checkpointing."""

    REENTRANT = "reentrant"
    NON_REENTRANT = "non_reentrant"


Run = Callable[[Tensor, Tensor, Tensor | None, PackedLayout | None], Tensor]


class TinyLM(nn.Module):
    """A decoder-only language model that maps token ids [B, T] to logits [B, T, vocab]."""

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        heads: int,
        groups: int,
        d_k: int,
        d_v: int,
        block_len: int,
        block_stride: int,
        select_len: int,
        select_count: int,
        window: int,
    ) -> None:
        super().__init__()
        self._build(
            NSAConfig(
                vocab=vocab,
                dim=dim,
                layers=layers,
                heads=heads,
                groups=groups,
                d_k=d_k,
                d_v=d_v,
                block_len=block_len,
                block_stride=block_stride,
                select_len=select_len,
                select_count=select_count,
                window=window,
            ),
            Implementation.AUTO,
        )

    @classmethod
    def from_config(cls, config: NSAConfig, implementation: Implementation = Implementation.AUTO) -> TinyLM:
        """Return a model with newly initialized weights on the CPU.

        Raises MissingImplementationError if no layer would use `implementation`.
        """
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model._build(config, implementation)
        return model

    def _build(self, config: NSAConfig, implementation: Implementation) -> None:
        require_implementation(implementation, config)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(_block(config, implementation) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPSILON)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", rotary_frequencies(config.d_k), persistent=False)

    def forward(self, tokens_BT: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Return the logits [B, T, vocab] of the token ids.

        `lengths` splits the concatenated rows into documents of these lengths in tokens. Documents do not attend to
        each other, and positions start from 0 in each document. Raises ValueError if the lengths do not add up to B*T.
        """
        if lengths is None:
            return self._logits(tokens_BT, rotary_cos_sin(self.get_buffer("frequencies"), tokens_BT.shape[1]), None)
        if sum(lengths) != tokens_BT.numel() or min(lengths) < 1:
            raise ValueError(f"lengths: expected documents of {tokens_BT.numel()} tokens together, got {lengths}")
        documents = packed_layout(lengths, self.config.block_len, self.config.block_stride, tokens_BT.device)
        cos_sin_2Lp = rotary_cos_sin(self.get_buffer("frequencies"), documents.longest)
        logits_1TV = self._logits(tokens_BT.reshape(1, -1), cos_sin_2Lp[:, documents.positions_T], documents)
        return logits_1TV.view(*tokens_BT.shape, -1)

    def _logits(self, tokens_BT: Tensor, cos_sin_2Tp: Tensor, documents: PackedLayout | None) -> Tensor:
        x_BTM = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTM = block(x_BTM, cos_sin_2Tp, documents)
        return self.head(self.norm(x_BTM))


class Layer(nn.Module):
    """The base class of the transformer blocks.

    Subclasses implement `run`, which may be compiled and, with gradient checkpointing, runs again in the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute | None = None  # None: no gradient checkpointing
        self.compiled: Run | None = None  # the compiled `run`, or None

    def forward(self, x_BTM: Tensor, cos_sin_2Tp: Tensor, documents: PackedLayout | None = None) -> Tensor:
        """Return the output of the block, [B, T, M], with gradient checkpointing if enabled."""
        run = self.compiled or self.run
        if self.recompute is None:
            return run(x_BTM, cos_sin_2Tp, None, documents)
        # The first pass fills the memo and the recomputation reads it, so both use the same selected blocks. As an
        # argument of `checkpoint`, the memo stays alive until no recomputation can follow.
        reentrant = self.recompute is Recompute.REENTRANT
        return checkpoint(_run_with_memo, run, x_BTM, cos_sin_2Tp, SelectionMemo(), documents, use_reentrant=reentrant)

    def run(
        self, x_BTM: Tensor, cos_sin_2Tp: Tensor, memo_number: Tensor | None, documents: PackedLayout | None = None
    ) -> Tensor:
        """Compute the output of the block, [B, T, M].

        `memo_number` identifies the SelectionMemo of a block with gradient checkpointing.
        """
        raise NotImplementedError


def _run_with_memo(
    run: Run, x_BTM: Tensor, cos_sin_2Tp: Tensor, memo: SelectionMemo, documents: PackedLayout | None
) -> Tensor:
    return run(x_BTM, cos_sin_2Tp, memo.number, documents)


class Block(Layer):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=NORM_EPSILON)
        vanilla = config.attention is Attention.VANILLA
        self.attn = VanillaAttention(config) if vanilla else NSAttention.from_config(config, implementation)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=NORM_EPSILON)
        self.mlp = SwiGLU(config.dim)

    def run(
        self, x_BTM: Tensor, cos_sin_2Tp: Tensor, memo_number: Tensor | None, documents: PackedLayout | None = None
    ) -> Tensor:
        context = TokenContext(cos_sin_2Tp, memo_number, documents)
        x_BTM = x_BTM + self.attn(self.attn_norm(x_BTM), context=context)
        return x_BTM + self.mlp(self.mlp_norm(x_BTM))


class SwiGLU(nn.Module):
    """A SwiGLU MLP: down(silu(gate(x)) * up(x)).

    The hidden width is 8/3 of the model width, rounded up to a multiple of 64.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-dim * 8 // 3 // 64) * 64
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTM: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x_BTM)) * self.up(x_BTM))


class StockBlock(Layer):
    """PyTorch's own TransformerEncoderLayer with a causal mask, used as a baseline."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            config.dim, config.heads, 4 * config.dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def run(
        self, x_BTM: Tensor, _cos_sin: Tensor, _memo_number: Tensor | None, documents: PackedLayout | None = None
    ) -> Tensor:
        if documents is not None:
            raise ValueError("lengths: attention stock is torch's own layer, which takes one sequence a row")
        return self.layer(x_BTM, src_mask=self._mask(x_BTM), is_causal=True)

    def _mask(self, x_BTM: Tensor) -> Tensor:
        """Return the causal mask [T, T] that PyTorch's layer requires."""
        # In training the layer uses only `is_causal` and never reads the mask. The mask is then a single NaN expanded
        # to [T, T]: it takes no memory, and a PyTorch version that did read the mask would fail visibly.
        tokens = x_BTM.shape[1]
        if self.training:
            return x_BTM.new_full((), torch.nan).expand(tokens, tokens)
        return nn.Transformer.generate_square_subsequent_mask(tokens, x_BTM.device, x_BTM.dtype)


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _block(config: NSAConfig, implementation: Implementation) -> nn.Module:
    return StockBlock(config) if config.attention is Attention.STOCK else Block(config, implementation)
