"""Loading of checkpoints.

PyTorch's distributed checkpoint library (DCP) pickles its metadata and every value that is not a tensor. This module
unpickles only the types that a checkpoint needs, so an untrusted checkpoint cannot run code.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint import load as load_by_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..config import NSAConfig
from ..world import CannotRunError, World
from .choose import Start, find_checkpoint
from .rank_state import restore_rank_state
from .save import first_failure
from .shape import config_of


def load_checkpoint(
    start: Start,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    data: object,
    world: World,
) -> list[str]:
    """Restore the training state from a checkpoint, and return messages about what could not be restored.

    The checkpoint may have been saved with a different wrapper or a different number of ranks. Raises CannotRunError if
    the checkpoint cannot be read or does not fit this run.
    """
    assert start.checkpoint is not None
    assert start.manifest is not None
    weights, moments = get_state_dict(model, optimizer)
    _read(start.checkpoint, {"model": weights, "optimizer": moments}, alone=world.backend is None)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if scaler.is_enabled() and start.manifest.scaler:
        scaler.load_state_dict(dict(start.manifest.scaler))
    return restore_rank_state(start.checkpoint, start.manifest.world_size, world, data)


def read_weights(path: Path) -> tuple[NSAConfig, Mapping[str, Tensor]]:
    """Return the model configuration and the weights of a checkpoint.

    `path` is a checkpoint or a directory of checkpoints (the latest undamaged checkpoint is used). Raises
    CannotRunError if there is no usable checkpoint.
    """
    checkpoint, manifest, _ = find_checkpoint(path)
    entries = _metadata_of(checkpoint).state_dict_metadata
    prefix = "model."
    weights = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in entries.items()
        if name.startswith(prefix) and isinstance(kind, metadata.TensorStorageMetadata)
    }
    _read(checkpoint, weights, alone=True)
    return config_of(manifest.dimensions), {name.removeprefix(prefix): weight for name, weight in weights.items()}


def _metadata_of(checkpoint: Path) -> metadata.Metadata:
    try:
        return _Reader(checkpoint).read_metadata()
    except pickle.UnpicklingError as error:
        raise CannotRunError(f"{checkpoint}: {error}") from error


def _read(checkpoint: Path, into: dict[str, Any], *, alone: bool) -> None:
    """Load this rank's part of a checkpoint into the state dict `into`. If `alone`, no other rank takes part."""
    _metadata_of(checkpoint)  # torch 2.11 would not say why it cannot read the metadata
    try:
        load_by_dcp(into, storage_reader=_Reader(checkpoint), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:
        raise CannotRunError(f"{checkpoint}: {first_failure(error)}") from error


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for unsafe types; DCP would unpickle them
        value.seek(0)
        super().load_bytes(read_item, value)


class _Reader(FileSystemReader):
    def read_metadata(self, *_arguments: Any, **_options: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            content = _Unpickler(file).load()
        content.storage_meta = content.storage_meta or metadata.StorageMeta()
        content.storage_meta.load_id = self.load_id
        return content


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the types found in the metadata of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickle enum members like this
        kind = super().find_class(module, name) if module.partition(".")[0] in ("torch", "pathlib") else None
        is_from_dcp = isinstance(kind, type) and kind.__module__ == metadata.__name__
        if is_from_dcp or isinstance(kind, torch.dtype) or any(kind is allowed for allowed in _ALLOWED):
            return kind
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def _member(kind: Any, name: str) -> Any:
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name} of {kind} is not allowed in a checkpoint")


_ALLOWED = (torch.Size, pathlib.PosixPath, filesystem._StorageInfo, torch.serialization._get_layout)
