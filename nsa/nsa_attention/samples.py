"""Statistics of sampled steps: the blocks that attention selects, and the values of the gates.

Forward hooks store tensors, which are read only after the step. So nothing waits for the GPU during the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import NSAttention
from .branches import AttentionBranch, BlockSelector, GateMLP
from .observe import named_modules
from .ops.packed import PackedLayout

EVERY_STEPS = 10
SHUT, OPEN = 0.01, 0.99  # a gate value below SHUT or above OPEN is saturated
COLLAPSED_SHARE = 0.99  # a gate has collapsed if at least this share is saturated and its mean is at most SHUT


@dataclass(frozen=True, kw_only=True)
class SelectionRow:
    """Statistics of the blocks that one layer selected in a step, stored as a row of k_stats.csv.

    `mean`, `least` and `most` refer to the number of different blocks per query. Forced blocks are the first, the
    current and the previous block. Distances are in tokens. A field is None if no query selected the blocks it needs.
    """

    layer: str
    mean: float
    least: int
    most: int
    forced_share: float  # share of the selected blocks that are forced
    empty_share: float  # share of the n selection entries of each query that are not used
    distance_mean: float | None
    distance_max: int | None
    overlap: float | None  # share of a query's blocks that the previous query selected too
    entropy_bits: float | None  # entropy of the blocks that are not forced
    blocks: int  # number of blocks in the longest sequence


@dataclass(frozen=True, kw_only=True)
class GateRow:
    layer: str
    branch: str
    mean: float
    deviation: float
    saturated_share: float
    shut_share: float
    open_share: float

    @property
    def collapsed(self) -> bool:
        """Return whether the gate is closed for almost every token, so that its branch has no effect."""
        return self.mean <= SHUT and self.saturated_share >= COLLAPSED_SHARE


class Observer:
    """A recorder of the selected blocks, gates and dtypes in a step, based on forward hooks.

    The hooks are in the model only between `watch` and `release`. Compiled code does not run hooks that are added after
    compilation. For compiled models, therefore, only the dtypes of whole layers are recorded.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        self._modules = dict(named_modules(model))
        self._compiled = compiled
        self._outputs: dict[str, Tensor] = {}
        self._positions: dict[str, Tensor | None] = {}  # positions of queries in their documents; None without packing
        self._dtypes: dict[str, torch.dtype] = {}
        self._handles: list[Any] = []

    def watch(self, *, dtypes: bool = True) -> None:
        """Add forward hooks to the model. If `dtypes` is true, they also record the dtypes of activations."""
        for name, module in self._modules.items():
            if self._compiled and name.count(".") > 1:
                continue
            if isinstance(module, BlockSelector | GateMLP):
                self._handles.append(module.register_forward_hook(self._keep(name)))
            if dtypes and name and not isinstance(module, nn.ModuleList):
                # A hook on a branch would make the layer compute its branches separately. The output of a branch has
                # the dtype of its values, so the hook is on the value projection.
                source = module.v_proj if isinstance(module, AttentionBranch) else module
                self._handles.append(source.register_forward_hook(self._note_dtype(name)))

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def selections(self) -> list[SelectionRow]:
        return [
            selection_row(_layer(name), self._outputs[name], module.selection.select_len, self._positions[name])
            for name, module in self._modules.items()
            if isinstance(module, BlockSelector) and name in self._outputs
        ]

    def gates(self) -> list[GateRow]:
        rows: list[GateRow] = []
        for name, module in self._modules.items():
            if isinstance(module, NSAttention) and f"{name}.gate_mlp" in self._outputs:
                rows += gate_rows(_layer(name), self._outputs[f"{name}.gate_mlp"], map(str, module.config.branches))
        return rows

    def activation_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each module's floating-point output, by module name."""
        return dict(self._dtypes)

    def _keep(self, name: str) -> Any:
        def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            packed = next((argument for argument in inputs if isinstance(argument, PackedLayout)), None)
            self._outputs[name], self._positions[name] = output.detach(), packed and packed.positions_T

        return keep

    def _note_dtype(self, name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._dtypes[name] = tensor.dtype

        return note


def selection_row(layer: str, indices_BGTn: Tensor, select_len: int, positions_T: Tensor | None = None) -> SelectionRow:
    """Return the statistics of the selected blocks of one layer.

    `indices_BGTn` contains the block indices that each query selected, negative for unused entries. `select_len` is the
    block length in tokens. `positions_T` is the position of each query in its document; None if each row is a single
    sequence.
    """
    tokens = indices_BGTn.shape[2]
    positions_T = torch.arange(tokens, device=indices_BGTn.device) if positions_T is None else positions_T
    sorted_BGTn = indices_BGTn.sort(-1).values
    is_selected = sorted_BGTn >= 0  # below, repeated blocks are removed
    filled_share = is_selected.double().mean()
    is_selected[..., 1:] &= sorted_BGTn[..., 1:] != sorted_BGTn[..., :-1]
    distinct = is_selected.sum(-1)
    current = positions_T[:, None] // select_len
    is_forced = is_selected & ((sorted_BGTn == 0) | (sorted_BGTn == current) | (sorted_BGTn == current - 1))
    blocks = int(current.max()) + 1 if tokens else 0
    distances = torch.where(is_selected, _distances(sorted_BGTn, positions_T, select_len), -1)
    numbers = torch.stack(
        [
            distinct.double().mean(),
            distinct.min(),
            distinct.max(),
            is_forced.sum() / distinct.sum(),
            1 - filled_share,
            distances.clamp(min=0).sum() / distinct.sum(),
            distances.max(),
            _overlap(sorted_BGTn, is_selected, positions_T),
            _entropy_bits(sorted_BGTn, is_selected & ~is_forced, blocks),
        ]
    )
    mean, least, most, forced_share, empty_share, distance, furthest, overlap, entropy = numbers.tolist()
    return SelectionRow(
        layer=layer,
        mean=mean,
        least=int(least),
        most=int(most),
        forced_share=forced_share,
        empty_share=empty_share,
        distance_mean=_none_if_nan(distance),
        distance_max=int(furthest) if furthest >= 0 else None,
        overlap=_none_if_nan(overlap),
        entropy_bits=_none_if_nan(entropy),
        blocks=blocks,
    )


def _distances(blocks: Tensor, positions_T: Tensor, select_len: int) -> Tensor:
    """Return the distance, in tokens, from each query back to the end of each of its selected blocks."""
    last = blocks.long() * select_len + select_len - 1
    return (positions_T[:, None] - last).clamp(min=0)


def _overlap(sorted_BGTn: Tensor, is_selected: Tensor, positions_T: Tensor) -> Tensor:
    """Return the mean fraction of a query's selected blocks that the previous query also selected."""
    same = sorted_BGTn[:, :, 1:, :, None] == sorted_BGTn[:, :, :-1, None, :]
    shared = (same & is_selected[:, :, 1:, :, None] & is_selected[:, :, :-1, None, :]).any(-1).sum(-1)
    own = is_selected[:, :, 1:].sum(-1)
    counts = (own > 0) & (positions_T[1:] == positions_T[:-1] + 1)
    return (shared / own.clamp(min=1) * counts).sum() / counts.sum()


def _entropy_bits(blocks_BGTn: Tensor, is_free: Tensor, blocks: int) -> Tensor:
    """Return the entropy, in bits, of the block indices for which `is_free` is true, or NaN if there are none."""
    entries = torch.where(is_free, blocks_BGTn.long().clamp(max=blocks - 1), blocks).flatten()
    counts = torch.zeros(blocks + 1, dtype=torch.double, device=blocks_BGTn.device)
    counts.scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.double))
    shares = counts[:blocks] / counts[:blocks].sum()
    return torch.special.entr(shares).sum() / torch.log(torch.tensor(2.0, dtype=torch.double))


def _none_if_nan(value: float) -> float | None:
    return None if value != value else value


def gate_rows(layer: str, gates: Tensor, branches: Iterable[str]) -> list[GateRow]:
    """Return the statistics of one layer's gates, one row per branch."""
    flat = gates.flatten(1).double()
    shut, open_ = (flat < SHUT).double().mean(1), (flat > OPEN).double().mean(1)
    numbers = torch.stack([flat.mean(1), flat.std(1), shut + open_, shut, open_], 1).tolist()
    return [
        GateRow(
            layer=layer,
            branch=branch,
            mean=mean,
            deviation=deviation,
            saturated_share=saturated,
            shut_share=shut_share,
            open_share=open_share,
        )
        for branch, (mean, deviation, saturated, shut_share, open_share) in zip(branches, numbers, strict=True)
    ]


def mean_gates(rows: Iterable[GateRow]) -> dict[str, float]:
    """Return the mean gate value of each branch over all layers."""
    by_branch: dict[str, list[float]] = {}
    for row in rows:
        by_branch.setdefault(row.branch, []).append(row.mean)
    return {branch: sum(means) / len(means) for branch, means in by_branch.items()}


def _layer(name: str) -> str:
    return name.split(".")[1]
