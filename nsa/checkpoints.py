"""Checkpoints of a run: written aside and renamed, so that a killed run leaves a whole one or none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from nsa.model import TinyLM
from nsa.world import CannotRunError, World


def save_checkpoint(directory: Path, step: int, model: TinyLM, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Rank 0 writes checkpoint_step<k>.pt; the others go on, as all of them hold the same weights."""
    if not world.is_first:
        return
    path = directory / f"checkpoint_step{step}.pt"
    aside = path.with_suffix(".tmp")
    content = {
        "step": step,
        "dimensions": _dimensions(model),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, aside)
    aside.replace(path)


def load_checkpoint(path: Path, model: TinyLM, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer; returns the step that was saved."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    saved, wanted = content["dimensions"], _dimensions(model)
    mistakes = [
        f"--resume {path}: saved with {key} {saved.get(key)}, this run has {value}"
        for key, value in wanted.items()
        if saved.get(key) != value
    ]
    if mistakes:
        raise CannotRunError("\n".join(mistakes))
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["step"])


def _dimensions(model: TinyLM) -> dict[str, str]:
    """What the weights depend on, as text, so that it loads without trusting the file."""
    ignored = ("name", "seq_len", "dtype", "batch", "checkpointed")
    named = {key: value for key, value in asdict(model.config).items() if key not in ignored}
    return {key: "+".join(value) if isinstance(value, tuple) else str(value) for key, value in named.items()}
