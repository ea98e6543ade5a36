"""Numbers from inside the model, on sampled steps: what was selected, how open the gates are, which dtypes flow.

Hooks keep tensors; they are read once, when the step is over, so that no operation waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import BlockChooser, GateMLP, NSAttention
from nsa.names import named_modules

EVERY_STEPS = 10
_CLOSED, _OPEN = 0.01, 0.99  # a gate beyond these is saturated


@dataclass(frozen=True, kw_only=True)
class SelectionRow:
    layer: str
    mean: float
    least: int
    most: int
    forced_share: float
    empty_share: float


@dataclass(frozen=True, kw_only=True)
class GateRow:
    layer: str
    branch: str
    mean: float
    deviation: float
    saturated_share: float


class Observer:
    """Forward hooks that are in the model only while a sampled step runs.

    Compiled code keeps the hooks it was compiled with and sees no others: compiled layers are watched as a whole only.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        self._modules = dict(named_modules(model))
        self._compiled = compiled
        self._kept: dict[str, Tensor] = {}
        self._dtypes: dict[str, str] = {}
        self._handles: list[Any] = []

    def watch(self) -> None:
        for name, module in self._modules.items():
            if self._compiled and name.count(".") > 1:
                continue
            if isinstance(module, BlockChooser | GateMLP):
                self._handles.append(module.register_forward_hook(self._keep(name)))
            elif name.startswith("blocks.") and name.count(".") <= 3:
                self._handles.append(module.register_forward_hook(self._note_dtype(name)))

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def selections(self) -> list[SelectionRow]:
        return [
            selection_row(_layer(name), self._kept[name], module.selection.select_len)
            for name, module in self._modules.items()
            if isinstance(module, BlockChooser) and name in self._kept
        ]

    def gates(self) -> list[GateRow]:
        rows: list[GateRow] = []
        for name, module in self._modules.items():
            if isinstance(module, NSAttention) and f"{name}.gate_mlp" in self._kept:
                rows += gate_rows(_layer(name), self._kept[f"{name}.gate_mlp"], map(str, module.config.branches))
        return rows

    def activation_dtypes(self) -> dict[str, str]:
        return dict(self._dtypes)

    def _keep(self, name: str) -> Any:
        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            self._kept[name] = output.detach()

        return keep

    def _note_dtype(self, name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            self._dtypes[name] = str(tensor.dtype)

        return note


def selection_row(layer: str, indices_BGTn: Tensor, select_len: int) -> SelectionRow:
    """Counts over all queries: different blocks per query, and how many places are forced or empty."""
    ordered = indices_BGTn.sort(-1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    filled = ordered >= 0
    distinct = (new & filled).sum(-1)
    current = torch.arange(ordered.shape[2], device=ordered.device)[:, None] // select_len
    forced = filled & new & ((ordered == 0) | (ordered == current) | (ordered == current - 1))
    numbers = torch.stack(
        [
            distinct.double().mean(),
            distinct.min(),
            distinct.max(),
            forced.sum() / distinct.sum(),
            1 - filled.double().mean(),
        ]
    )
    mean, least, most, forced_share, empty_share = numbers.tolist()
    return SelectionRow(
        layer=layer,
        mean=mean,
        least=int(least),
        most=int(most),
        forced_share=forced_share,
        empty_share=empty_share,
    )


def gate_rows(layer: str, gates: Tensor, branches: Iterable[str]) -> list[GateRow]:
    """Mean, deviation and saturated share of gates [branches, ...] of one layer."""
    flat = gates.flatten(1).double()
    saturated = ((flat < _CLOSED) | (flat > _OPEN)).double().mean(1)
    numbers = torch.stack([flat.mean(1), flat.std(1), saturated], 1).tolist()
    return [
        GateRow(layer=layer, branch=branch, mean=mean, deviation=deviation, saturated_share=share)
        for branch, (mean, deviation, share) in zip(branches, numbers, strict=True)
    ]


def _layer(name: str) -> str:
    return name.split(".")[1]
