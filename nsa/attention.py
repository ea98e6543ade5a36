"""Native sparse attention as a layer: three branches with their own keys and values, and the gate that mixes them.

Dimensions: B batch, T tokens, M model width, H query heads, G groups, S compressed blocks, D key, E value, n places.
`turns` is what nsa/rope.py rotates by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa.config import Branch, Compression, Implementation, NSAConfig
from nsa.ops.compressed import compressed_attention
from nsa.ops.dispatch import Choice, choose_kernel, flash_function
from nsa.ops.selected import selected_attention
from nsa.ops.sliding import flash_sliding_attention, sliding_attention
from nsa.ops.topk import Selection, choose_blocks
from nsa.rope import rotate


class NSAttention(nn.Module):
    """Paper section 3: o = sum over the branches of gate * attention(q, K_branch, V_branch)."""

    def __init__(self, config: NSAConfig, implementation: Implementation = Implementation.AUTO) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.dim, config.heads * config.d_k, bias=False)
        if Branch.CMP in config.branches:
            self.cmp = CompressedBranch(config, implementation)
        if Branch.SEL in config.branches:
            self.sel = SelectedBranch(config, implementation)
        if Branch.WIN in config.branches:
            self.win = SlidingBranch(config, implementation)
        self.gate_mlp = GateMLP(config)
        # Frozen as well: DDP would wait for gradients that never come.
        self.gate_mlp.requires_grad_(not config.stop_gradient_gates)
        self.out_proj = nn.Linear(config.heads * config.d_v, config.dim, bias=False)

    def forward(self, x_BTM: Tensor, turns: Tensor, memo_number: Tensor | None = None) -> Tensor:
        q_BHTD = rotate(split_heads(self.q_proj(x_BTM), self.config.heads), turns)
        outputs, scorer_keys = [], None
        if Branch.CMP in self.config.branches:
            output, scorer_keys = self.cmp(x_BTM, q_BHTD, turns)
            outputs.append(output)
        if Branch.SEL in self.config.branches:
            outputs.append(self.sel(x_BTM, q_BHTD, turns, scorer_keys, memo_number))
        if Branch.WIN in self.config.branches:
            outputs.append(self.win(x_BTM, q_BHTD, turns))
        gates = self.gate_mlp(x_BTM.detach() if self.config.stop_gradient_gates else x_BTM)  # [branches, B, H, T, 1]
        mixed = outputs[0] * gates[0]
        for output, gate in zip(outputs[1:], gates[1:], strict=True):
            mixed = torch.addcmul(mixed, output, gate)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class GateMLP(nn.Linear):
    """Sigmoid gates per branch and head. It is its own last layer, so its parameters read `gate_mlp.weight`."""

    def __init__(self, config: NSAConfig) -> None:
        hidden = max(16, config.dim // 8)
        super().__init__(hidden, len(config.branches) * config.heads)
        self.heads = config.heads
        self.hidden = nn.Linear(config.dim, hidden)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """Gates [branches, B, H, T, 1] in (0, 1)."""
        logits = super().forward(functional.silu(self.hidden(x_BTM)))
        return torch.sigmoid(logits).unflatten(-1, (-1, self.heads)).permute(2, 0, 3, 1).unsqueeze(-1)


class BlockCompression(nn.Module):
    """One vector per block of l tokens: their mean, or an MLP over them with a learned position inside the block."""

    def __init__(self, config: NSAConfig, width: int) -> None:
        super().__init__()
        self.length, self.stride = config.block_len, config.block_stride
        self.mlp = config.compression is Compression.MLP
        if self.mlp:
            self.position = nn.Parameter(torch.randn(self.length, width) * 0.02)
            self.inner = nn.Linear(self.length * width, width)
            self.outer = nn.Linear(width, width)

    def forward(self, x_BGTD: Tensor) -> Tensor:
        """Blocks [B, G, S, D]: only complete ones, so S = 0 for a sequence shorter than l."""
        blocks_BGSlD = blocks_of(x_BGTD, self.length, self.stride)
        mean = blocks_BGSlD.mean(3)
        if not self.mlp:
            return mean
        # Around the mean: a fresh layer starts from sensible keys instead of noise.
        return mean + self.outer(functional.gelu(self.inner((blocks_BGSlD + self.position).flatten(3))))


class CompressedBranch(nn.Module):
    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[Choice] = Counter()
        self.k_proj = nn.Linear(config.dim, config.groups * config.d_k, bias=False)
        self.v_proj = nn.Linear(config.dim, config.groups * config.d_v, bias=False)
        self.k_blocks = BlockCompression(config, config.d_k)
        self.v_blocks = BlockCompression(config, config.d_v)

    def forward(self, x_BTM: Tensor, q_BHTD: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, H, T, E] and the compressed keys, by which the selected branch ranks its blocks."""
        config = self.config
        k_BGSD = rotate_blocks(self.k_blocks(split_heads(self.k_proj(x_BTM), config.groups)), turns, config)
        v_BGSE = self.v_blocks(split_heads(self.v_proj(x_BTM), config.groups))
        lengths = {"block_len": config.block_len, "block_stride": config.block_stride}
        return attended(self, compressed_attention, q_BHTD, k_BGSD, v_BGSE, **lengths), k_BGSD


class BlockChooser(nn.Module):
    """A module without parameters, so that what was chosen can be seen from outside through a forward hook."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.selection = Selection(
            block_len=config.block_len,
            block_stride=config.block_stride,
            select_len=config.select_len,
            select_count=config.select_count,
            scale=config.scale,
        )

    def forward(self, q_BHTD: Tensor, scorer_keys_BGSD: Tensor, memo_number: Tensor | None) -> Tensor:
        return choose_blocks(q_BHTD, scorer_keys_BGSD, self.selection, memo_number)


class SelectedBranch(nn.Module):
    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[Choice] = Counter()
        self.k_proj = nn.Linear(config.dim, config.groups * config.d_k, bias=False)
        self.v_proj = nn.Linear(config.dim, config.groups * config.d_v, bias=False)
        self.chooser = BlockChooser(config)

    def forward(
        self, x_BTM: Tensor, q_BHTD: Tensor, turns: Tensor, scorer_keys: Tensor | None, memo_number: Tensor | None
    ) -> Tensor:
        """Output [B, H, T, E]. Without scorer keys the mean of its own keys per block ranks the blocks."""
        config = self.config
        k_BGTD = split_heads(self.k_proj(x_BTM), config.groups)
        v_BGTE = split_heads(self.v_proj(x_BTM), config.groups)
        if scorer_keys is None:
            # Nothing would train a scorer of its own: the choice has no gradient.
            means = blocks_of(k_BGTD, config.block_len, config.block_stride).mean(3)
            scorer_keys = rotate_blocks(means, turns, config)
        indices = self.chooser(q_BHTD.detach(), scorer_keys.detach(), memo_number)
        k_BGTD = rotate(k_BGTD, turns)
        return attended(self, selected_attention, q_BHTD, k_BGTD, v_BGTE, indices, select_len=config.select_len)


class SlidingBranch(nn.Module):
    def __init__(self, config: NSAConfig, implementation: Implementation) -> None:
        super().__init__()
        self.config, self.implementation = config, implementation
        self.runs: Counter[Choice] = Counter()
        self.k_proj = nn.Linear(config.dim, config.groups * config.d_k, bias=False)
        self.v_proj = nn.Linear(config.dim, config.groups * config.d_v, bias=False)

    def forward(self, x_BTM: Tensor, q_BHTD: Tensor, turns: Tensor) -> Tensor:
        k_BGTD = rotate(split_heads(self.k_proj(x_BTM), self.config.groups), turns)
        v_BGTE = split_heads(self.v_proj(x_BTM), self.config.groups)
        if self.implementation is Implementation.FLASH:
            return self._flash(q_BHTD, k_BGTD, v_BGTE)
        return attended(self, sliding_attention, q_BHTD, k_BGTD, v_BGTE, window=self.config.window)

    def _flash(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor) -> Tensor:
        count(self.runs, Choice("flash_attn", "asked for"))
        flash = flash_function(q_BHTD.device.type)
        window, scale = self.config.window, self.config.scale
        return flash_sliding_attention(q_BHTD, k_BGTD, v_BGTE, window=window, scale=scale, flash=flash)


def attended(
    branch: CompressedBranch | SelectedBranch | SlidingBranch,
    operation: Callable[..., tuple[Tensor, Tensor]],
    *tensors: Tensor,
    **lengths: int,
) -> Tensor:
    """Output [B, H, T, E] of a branch's operation on (q, k, v, ...), by the implementation that suits them."""
    kernel, choice = choose_kernel(branch.implementation, tensors[0], tensors[2])
    count(branch.runs, choice)
    output, _ = operation(*tensors, **lengths, scale=branch.config.scale, kernel=kernel)
    return output


def count(runs: Counter[Choice], choice: Choice) -> None:
    """Compiled code is not counted: it would be traced once and run many times."""
    if not torch.compiler.is_compiling():
        runs[choice] += 1


class VanillaAttention(nn.Module):
    """The control: dense causal attention with the same heads, groups and widths."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.dim, config.heads * config.d_k, bias=False)
        self.k_proj = nn.Linear(config.dim, config.groups * config.d_k, bias=False)
        self.v_proj = nn.Linear(config.dim, config.groups * config.d_v, bias=False)
        self.out_proj = nn.Linear(config.heads * config.d_v, config.dim, bias=False)

    def forward(self, x_BTM: Tensor, turns: Tensor, _memo_number: Tensor | None = None) -> Tensor:
        q_BHTD = rotate(split_heads(self.q_proj(x_BTM), self.config.heads), turns)
        k_BGTD = rotate(split_heads(self.k_proj(x_BTM), self.config.groups), turns)
        v_BGTE = split_heads(self.v_proj(x_BTM), self.config.groups)
        output = functional.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTE, is_causal=True, enable_gqa=True)
        return self.out_proj(output.transpose(1, 2).flatten(2))


def split_heads(x_BTM: Tensor, heads: int) -> Tensor:
    return x_BTM.unflatten(-1, (heads, -1)).transpose(1, 2)


def blocks_of(x_BGTD: Tensor, length: int, stride: int) -> Tensor:
    """Views of the complete blocks, [B, G, S, l, D]."""
    if x_BGTD.shape[2] < length:
        # No block, but still connected to the graph: the projections get a gradient of zeros, not none.
        return x_BGTD[:, :, :0, None].expand(-1, -1, -1, length, -1)
    return x_BGTD.unfold(2, length, stride).transpose(3, 4)


def rotate_blocks(k_BGSD: Tensor, turns: Tensor, config: NSAConfig) -> Tensor:
    """A compressed key stands at the position of its block's last token, the first from which it is seen."""
    return rotate(k_BGSD, turns[:, config.block_len - 1 :: config.block_stride])
