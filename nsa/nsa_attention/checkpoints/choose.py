"""The choice of the checkpoint from which a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ..settings import Settings
from ..values import Resume
from ..world import CannotRunError, World
from .folder import COMPLETE, FOLDER, DamagedError, Manifest, checkpoints_in, recover, step_of, unfinished_in, verify
from .save import influential_settings
from .shape import differences, dimension_differences, dimensions


@dataclass(frozen=True, kw_only=True)
class Start:
    """The step and checkpoint that a run starts from."""

    step: int = 0  # the last finished step; 0 for a new run
    checkpoint: Path | None = None  # None for a new run
    manifest: Manifest | None = None  # None for a new run
    notes: tuple[str, ...] = ()  # human-readable lines about the choice


def choose_start(settings: Settings, world: World) -> Start:
    """Return the step and checkpoint that the run starts from.

    Rank 0 decides and broadcasts the result. If no checkpoint can be used, every rank raises CannotRunError.
    """
    if settings.resume is None:
        return Start()
    choice: list[Start | str | None] = [None]
    if world.is_first:
        try:
            choice = [_choose(settings)]
        except CannotRunError as error:
            choice = [str(error)]
    if world.backend is not None:
        dist.broadcast_object_list(choice, device=world.device if world.backend == "nccl" else None)
    (start,) = choice
    if not isinstance(start, Start):
        raise CannotRunError(start)
    return start


def find_checkpoint(path: Path) -> tuple[Path, Manifest, list[str]]:
    """Return the latest undamaged checkpoint, its manifest, and one message per skipped checkpoint.

    If `path` is itself a checkpoint, only this checkpoint is considered. Otherwise `path` is a run's output directory
    or a directory of checkpoints. Raises NoCheckpointError if the directory has no finished checkpoint, and
    CannotRunError if all its checkpoints are damaged or the latest undamaged one has a newer format.
    """
    if (path / COMPLETE).exists() or step_of(path) is not None:
        try:
            return path, verify(path), []
        except DamagedError as error:
            raise CannotRunError(f"{path} is damaged: {error}{_alternative_to(path)}") from None
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    recover(folder)
    skipped = [f"{unfinished} was never finished" for unfinished in unfinished_in(folder)]
    candidates = checkpoints_in(folder)
    for candidate in candidates:
        try:
            return candidate, verify(candidate), skipped
        except DamagedError as error:
            skipped.append(f"{candidate} is damaged: {error}")
    if not candidates:
        raise NoCheckpointError("; ".join([f"{folder} contains no checkpoint", *skipped]))
    raise CannotRunError("\n".join([f"{folder}: none of {len(candidates)} checkpoints is undamaged", *skipped]))


class NoCheckpointError(CannotRunError):
    """Raised if a directory contains no finished checkpoint."""


def _choose(settings: Settings) -> Start:
    resume = settings.resume
    try:
        path, manifest, skipped = find_checkpoint(resume if isinstance(resume, Path) else settings.out_dir)
    except NoCheckpointError as error:
        if resume is not Resume.AUTO:
            raise CannotRunError(f"--resume {resume}: {error}") from None
        return Start(notes=(f"--resume auto: {error}; starting from step 1",))
    except CannotRunError as error:
        raise CannotRunError("\n".join(f"--resume {resume}: {line}" for line in str(error).splitlines())) from None
    _check_dimensions(path, manifest.dimensions, settings)
    notes = [*skipped, f"resuming from {path}, written after step {manifest.step}"]
    notes += differences(manifest.settings, influential_settings(settings))
    return Start(step=manifest.step, checkpoint=path, manifest=manifest, notes=tuple(notes))


def _check_dimensions(path: Path, saved_dimensions: Mapping[str, str], settings: Settings) -> None:
    if mistakes := list(dimension_differences(saved_dimensions, dimensions(settings.model))):
        raise CannotRunError("\n".join(f"--resume {path}: {mistake}" for mistake in mistakes))


def _alternative_to(damaged: Path) -> str:
    for other in checkpoints_in(damaged.parent):
        try:
            verify(other)
        except (DamagedError, CannotRunError):
            continue
        return f"; {other} is undamaged"
    return "; this directory has no undamaged checkpoint"
