"""Reading checkpoints, those of older versions too, into a model and its optimizer; and the weights alone.

DCP pickles its own description of a checkpoint, and every value that is no tensor. Both are read as what they may be
and nothing else, so that a checkpoint from elsewhere can be loaded without trusting it.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..config import NSAConfig
from ..world import CannotRunError, World
from .carried import take_up
from .choose import Start, read_file, whole_at
from .save import first_failure
from .shape import shape_of


def load_checkpoint(
    start: Start,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    data: object,
    world: World,
) -> list[str]:
    """Let a run go on from there, whatever wrapper and number of ranks saved it.

    Returns what is not as it was, for people. Raises CannotRunError for what does not fit.
    """
    assert start.checkpoint is not None
    if start.manifest is None:
        _load_file(start.checkpoint, model, optimizer)
        return []
    weights, moments = get_state_dict(model, optimizer)
    _read(start.checkpoint, {"model": weights, "optimizer": moments}, alone=world.backend is None)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if scaler.is_enabled() and start.manifest.scaler:
        scaler.load_state_dict(dict(start.manifest.scaler))
    return take_up(start.checkpoint, start.manifest.world_size, world, data)


def read_weights(path: Path) -> tuple[NSAConfig, Mapping[str, Tensor]]:
    """The shape and the weights that a run saved. Raises CannotRunError for what is no checkpoint."""
    if path.is_file():
        return read_file(path, "", lambda content: (shape_of(content["dimensions"]), content["model"]))
    checkpoint, manifest, _ = whole_at(path)
    try:
        saved = _Reader(checkpoint).read_metadata().state_dict_metadata
    except pickle.UnpicklingError as error:
        raise CannotRunError(f"{checkpoint}: {error}") from error
    prefix = "model."
    weights = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in saved.items()
        if name.startswith(prefix) and isinstance(kind, metadata.TensorStorageMetadata)
    }
    _read(checkpoint, weights, alone=True)
    return shape_of(manifest.dimensions), {name.removeprefix(prefix): weight for name, weight in weights.items()}


def _read(checkpoint: Path, into: dict[str, Any], *, alone: bool) -> None:
    """Each tensor in place, this rank's part of it."""
    try:
        load_by_dcp(into, storage_reader=_Reader(checkpoint), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:
        raise CannotRunError(f"{checkpoint}: {first_failure(error)}") from error


def _load_file(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whole tensors, read by every rank."""
    weights, moments = read_file(path, "--resume ", lambda content: (content["model"], content["optimizer"]))
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=whole)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for what DCP, which trusts it, must not see
        value.seek(0)
        super().load_bytes(read_item, value)


class _Reader(FileSystemReader):
    def read_metadata(self, *_arguments: Any, **_options: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Of names, sizes, dtypes and places in files."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11.0 to 3.11.3 write a member of an enumeration
        found = super().find_class(module, name) if module.partition(".")[0] in ("torch", "pathlib") else None
        of_dcp = isinstance(found, type) and found.__module__ == metadata.__name__
        if of_dcp or isinstance(found, torch.dtype) or any(found is one for one in _PLAIN):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def _member(kind: Any, name: str) -> Any:
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name} of {kind} does not belong into a checkpoint")


_PLAIN = (torch.Size, pathlib.PosixPath, filesystem._StorageInfo, torch.serialization._get_layout)
