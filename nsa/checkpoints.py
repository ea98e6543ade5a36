"""Checkpoints of a run: written aside and renamed, so that a killed run leaves a whole one or none.

They hold whole tensors under the model's own names, so a run may go on under another wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from .config import Attention, Compression, NSAConfig
from .settings import branches
from .world import CannotRunError, World

# What a run may change and still use the weights.
_IGNORED = ("name", "seq_len", "dtype", "batch", "checkpointed", "stop_gradient_gates")


def save_checkpoint(
    directory: Path, step: int, model: nn.Module, config: NSAConfig, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Rank 0 writes checkpoint_step<k>.pt. Every rank must call it: sharded tensors are gathered."""
    # Nearly a second of imports, which a run without checkpoints need not pay; below too.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    # On a CPU nothing has to move, and FSDP1 would move views of memory that it frees before they are read.
    whole = StateDictOptions(full_state_dict=True, cpu_offload=world.device.type != "cpu")
    weights, moments = get_state_dict(model, optimizer, options=whole)
    if not world.is_first:
        return
    path = directory / f"checkpoint_step{step}.pt"
    aside = path.with_suffix(".tmp")
    torch.save({"step": step, "dimensions": dimensions(config), "model": weights, "optimizer": moments}, aside)
    aside.replace(path)


def load_checkpoint(path: Path, model: nn.Module, config: NSAConfig, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer; returns the step that was saved."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    content = torch.load(path, map_location="cpu", weights_only=True)
    mistakes = _differences(path, content["dimensions"], dimensions(config))
    if mistakes:
        raise CannotRunError("\n".join(mistakes))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    return int(content["step"])


def read_weights(path: Path) -> tuple[NSAConfig, Mapping[str, Tensor]]:
    """The shape and the weights that a run saved. Raises CannotRunError for a file that is no checkpoint."""
    try:
        # Mapped, so that the optimizer's moments are not read.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return shape_of(content["dimensions"]), content["model"]
    except (OSError, RuntimeError, UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise CannotRunError(
            f"{path}: not a checkpoint of nsa.train ({type(error).__name__}); give a checkpoint_step<k>.pt of a run"
        ) from error


def shape_of(saved: Mapping[str, str]) -> NSAConfig:
    """The shape whose `dimensions` these are; fields that the weights do not depend on have their defaults."""
    kinds = {"attention": Attention, "branches": branches, "compression": Compression}
    fields: dict[str, Any] = {key: kinds.get(key, int)(text) for key, text in saved.items()}
    return NSAConfig(name="saved", **fields)


def dimensions(config: NSAConfig) -> dict[str, str]:
    """What the weights depend on, as text, so that it loads without trusting the file."""
    named = {key: value for key, value in asdict(config).items() if key not in _IGNORED}
    return {key: "+".join(value) if isinstance(value, tuple) else str(value) for key, value in named.items()}


def _differences(path: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    return [
        f"--resume {path}: saved with {key} {saved.get(key)}, this run has {value}"
        for key, value in wanted.items()
        if saved.get(key) != value
    ]
