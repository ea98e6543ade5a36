"""The language model: embedding, blocks, norm, head. One device; nsa/parallelize.py spreads it."""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nsa.attention import NSAttention, SelectionMemo, VanillaAttention
from nsa.config import Attention, Implementation, NSAConfig
from nsa.rope import angles, frequencies


class Recompute(StrEnum):
    """How gradient checkpointing runs a block again in the backward pass."""

    REENTRANT = "reentrant"
    NON_REENTRANT = "non_reentrant"


class TinyLM(nn.Module):
    """Tokens [B, T] to logits [B, T, vocab]."""

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
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model._build(config, implementation)
        return model

    def _build(self, config: NSAConfig, implementation: Implementation) -> None:
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(_block(config, implementation) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", frequencies(config.d_k), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        turns = angles(self.get_buffer("frequencies"), tokens_BT.shape[1])
        x_BTM = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTM = block(x_BTM, turns)
        return self.head(self.norm(x_BTM))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.recompute: Recompute | None = None  # None: activations are kept
        self.attn_norm = nn.RMSNorm(config.dim)
        vanilla = config.attention is Attention.VANILLA
        self.attn = VanillaAttention(config) if vanilla else NSAttention(config, implementation)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config.dim)

    def forward(self, x_BTM: Tensor, turns: Tensor) -> Tensor:
        if self.recompute is None:
            return self._run(x_BTM, turns, None)
        # The memo is filled by the first pass and read by the second: both see the same selected blocks.
        reentrant = self.recompute is Recompute.REENTRANT
        return checkpoint(self._run, x_BTM, turns, SelectionMemo(), use_reentrant=reentrant)

    def _run(self, x_BTM: Tensor, turns: Tensor, memo: SelectionMemo | None) -> Tensor:
        x_BTM = x_BTM + self.attn(self.attn_norm(x_BTM), turns, memo)
        return x_BTM + self.mlp(self.mlp_norm(x_BTM))


class SwiGLU(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-dim * 8 // 3 // 64) * 64
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTM: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x_BTM)) * self.up(x_BTM))


class StockBlock(nn.Module):
    """torch's own encoder layer under a causal mask: the control that shares no layer code with us."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.recompute: Recompute | None = None
        self.layer = nn.TransformerEncoderLayer(
            config.dim, config.heads, 4 * config.dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x_BTM: Tensor, _turns: Tensor) -> Tensor:
        if self.recompute is None:
            return self._run(x_BTM)
        return checkpoint(self._run, x_BTM, use_reentrant=self.recompute is Recompute.REENTRANT)

    def _run(self, x_BTM: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTM.shape[1], x_BTM.device, x_BTM.dtype)
        return self.layer(x_BTM, src_mask=mask, is_causal=True)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _block(config: NSAConfig, implementation: Implementation) -> nn.Module:
    return StockBlock(config) if config.attention is Attention.STOCK else Block(config, implementation)
