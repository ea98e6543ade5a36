"""Configurations of NSA layers and language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import MappingProxyType


class Branch(StrEnum):
    """The three attention branches of the NSA paper."""

    CMP = "cmp"
    SEL = "sel"
    WIN = "win"


class Attention(StrEnum):
    """The kind of attention in a model: NSA, or a dense baseline for comparison."""

    NSA = "nsa"
    VANILLA = "vanilla"  # dense causal attention in the same block, with the same heads and groups
    STOCK = "stock"  # layers of torch.nn.TransformerEncoderLayer, without any code of this package


class Implementation(StrEnum):
    """The implementations of attention that `--impl` can select."""

    AUTO = "auto"  # the fastest implementation that supports the device, dtype and widths
    EAGER = "eager"  # plain PyTorch, on every device
    TRITON = "triton"  # the Triton kernels of ops/fused in every branch
    TORCH = "torch"  # PyTorch's flash attention in the sliding branch, the other branches as with auto
    FLASH = "flash"  # flash-attn in the sliding branch, the other branches as with auto
    PER_TOKEN = "per_token"  # a Python loop over tokens in the selected branch, the other branches as with auto
    DENSE = "dense"  # full score matrices in every branch: memory grows with the square of the sequence length


# Implementations that compute only one branch; the other branches are chosen as with auto.
_ONE_BRANCH = {
    Implementation.TORCH: Branch.WIN,
    Implementation.FLASH: Branch.WIN,
    Implementation.PER_TOKEN: Branch.SEL,
}


class Compression(StrEnum):
    """Methods of compressing a block of tokens into one key and one value (phi in eq. 7 of the NSA paper)."""

    MLP = "mlp"  # as in the paper: an MLP over the block's concatenated tokens plus a learned position embedding
    MEAN = "mean"  # the mean of the block's tokens
    MEAN_MLP = "mean_mlp"  # the mean of the tokens, plus the output of an MLP as in `mlp`


FORCED_BLOCKS = 3  # always selected: block 0, the query's own block and the block before it
ALL_BRANCHES = (Branch.CMP, Branch.SEL, Branch.WIN)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes and options of one attention layer. Lengths are in tokens; comments give the letters of the NSA paper.

    The constructor does not validate the fields. `NSAttention` and `NSAConfig` do, with their own names for them.
    """

    dim: int = 128
    heads: int = 8
    groups: int = 2  # key and value heads; `heads / groups` query heads share one
    d_k: int = 16
    d_v: int = 16
    block_len: int = 16  # l
    block_stride: int = 8  # d
    select_len: int = 32  # l'
    select_count: int = 8  # n, including the forced blocks
    window: int = 64  # w
    branches: tuple[Branch, ...] = ALL_BRANCHES
    compression: Compression = Compression.MLP
    stop_gradient_gates: bool = False  # gates are not trained: no gradient flows into or through them
    rope_base: float = 10000.0  # base of the rotary frequencies
    softmax_scale: float | None = None  # None: 1 / sqrt(d_k)

    @property
    def scale(self) -> float:
        """Return the factor by which the dot products of queries and keys are multiplied."""
        return float(self.d_k**-0.5) if self.softmax_scale is None else self.softmax_scale


@dataclass(frozen=True, kw_only=True)
class NSAConfig(LayerConfig):
    """The sizes and options of a model. The constructor raises a ValueError that lists every invalid field."""

    name: str = "custom"
    vocab: int = 256
    layers: int = 4
    seq_len: int = 128
    attention: Attention = Attention.NSA
    dtype: str = "float32"
    batch: int = 2  # per rank, the training program's default
    checkpointed: bool = False  # default for gradient checkpointing in every layer; --gc overrides it

    def __post_init__(self) -> None:
        mistakes = config_mistakes(self)
        if mistakes:
            raise ValueError("\n".join(f"shape {self.name}: {mistake}" for mistake in mistakes))


_AT_LEAST_ONE = (
    "vocab",
    "dim",
    "layers",
    "heads",
    "groups",
    "d_v",
    "block_len",
    "block_stride",
    "select_len",
    "window",
    "seq_len",
    "batch",
)


def config_mistakes(config: NSAConfig) -> list[str]:
    """Return one message per invalid field of a model configuration."""
    mistakes = layer_mistakes(config)
    if config.attention is Attention.STOCK and config.heads >= 1 and config.dim % config.heads:
        mistakes.append(f"dim: expected a multiple of heads ({config.heads}) for the stock layer, got {config.dim}")
    return mistakes


def type_mistakes(numbers: Mapping[str, object]) -> list[str]:
    """Return one message for each argument that is not an integer. `numbers` maps names of arguments to values."""
    return [
        f"{name}: expected an integer, got {value!r}" for name, value in numbers.items() if not isinstance(value, int)
    ]


def layer_mistakes(config: LayerConfig, names: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return one message per invalid field of a layer or model configuration.

    `names` maps fields to the names that the messages use for them; other fields keep their own names.
    """
    name = {field.name: names.get(field.name, field.name) for field in fields(config)}
    integers = {name[field.name]: getattr(config, field.name) for field in fields(config) if field.type == "int"}
    if mistakes := type_mistakes(integers):
        return mistakes  # other checks compare these numbers
    mistakes = [
        f"{name[field]}: expected at least 1, got {getattr(config, field)}"
        for field in _AT_LEAST_ONE
        if field in name and getattr(config, field) < 1
    ]
    if config.d_k < 2 or config.d_k % 2:
        mistakes.append(f"{name['d_k']}: expected an even number (rotary positions turn pairs), got {config.d_k}")
    if config.groups >= 1 and config.heads % config.groups:
        mistakes.append(f"heads: expected a multiple of {name['groups']} ({config.groups}), got {config.heads}")
    if config.block_stride > config.block_len:
        mistakes.append(
            f"{name['block_stride']}: expected at most {name['block_len']} ({config.block_len}), "
            f"got {config.block_stride}: tokens between two blocks would belong to none"
        )
    if config.select_count < FORCED_BLOCKS:
        mistakes.append(
            f"{name['select_count']}: expected at least {FORCED_BLOCKS} (block 0, the current and the previous one are "
            f"always chosen), got {config.select_count}"
        )
    if not config.branches or len(set(config.branches)) != len(config.branches):
        mistakes.append(f"branches: expected one or more different branches, got {list(map(str, config.branches))}")
    return mistakes


def implementation_mistake(config: LayerConfig, requested: Implementation) -> str | None:
    """Return an error message if the model or layer cannot use the requested implementation, or None if it can.

    An example is --impl flash, which computes only the sliding branch, for a model without that branch.
    """
    if isinstance(config, NSAConfig) and config.attention is not Attention.NSA:
        reason = (
            f"attention {config.attention} has one implementation" if requested is not Implementation.AUTO else None
        )
    elif (branch := _ONE_BRANCH.get(requested)) not in (None, *config.branches):
        reason = f"it computes the branch {branch} alone, and the branches are {'+'.join(config.branches)}"
    else:
        reason = None
    return reason and f"--impl {requested}: {reason}; use --impl auto"


# Small enough for two CPU cores, and every branch has work at T=256: 31 compressed blocks, 8 selection blocks of which
# 4 are selected (3 of them forced, so 1 depends on the scores), and a window of a quarter of the sequence.
CI = NSAConfig(
    name="ci",
    heads=8,
    groups=2,
    block_len=16,
    block_stride=8,
    select_len=32,
    select_count=4,
    window=64,
    seq_len=256,
)
MINIMAL = NSAConfig(
    name="minimal",
    dim=768,
    layers=2,
    heads=12,
    groups=2,
    d_k=64,
    d_v=64,
    block_len=32,
    block_stride=16,
    select_len=64,
    select_count=16,
    window=512,
    seq_len=512,
    dtype="bfloat16",
)
# The model size and sequence length from a bug report: TinyLM(256, 128, 5, 8, 2, 16, 16, 16, 8, 32, 8, 64), trained on
# one sequence of 128 tokens.
REPRO = NSAConfig(name="repro", layers=5, seq_len=128, batch=1)
SHOWCASE = NSAConfig(name="showcase", layers=1, seq_len=128, batch=8)
PRODUCTION = replace(MINIMAL, name="production", vocab=50257, layers=12, seq_len=2048, checkpointed=True)
# For a quick test run of 100 steps before `production`: the same layers, with half the sequence length.
SHAKE = replace(PRODUCTION, name="shake", seq_len=1024, batch=1)

SHAPES = {config.name: config for config in (CI, MINIMAL, REPRO, SHOWCASE, SHAKE, PRODUCTION)}
