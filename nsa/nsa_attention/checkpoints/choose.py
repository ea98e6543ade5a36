"""From which checkpoint a run begins: rank 0 looks at every file and decides for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..settings import Settings
from ..values import Resume
from ..world import CannotRunError, World
from .folder import COMPLETE, FOLDER, DamagedError, Manifest, checked, checkpoints_in, recover, step_of, unfinished_in
from .save import decisive
from .shape import differences, dimensions, dimensions_differ

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    step: int = 0  # the last one that is done
    checkpoint: Path | None = None  # None: from nothing
    manifest: Manifest | None = None  # None beside a checkpoint: a file of an older version
    said: tuple[str, ...] = ()  # for people


def start_of(settings: Settings, world: World) -> Start:
    """The same on every rank, as nothing but rank 0's look decides. Raises CannotRunError on all of them."""
    if settings.resume is None:
        return Start()
    decided: list[Start | str | None] = [None]
    if world.is_first:
        try:
            decided = [_decided(settings)]
        except CannotRunError as error:
            decided = [str(error)]
    if world.backend is not None:
        dist.broadcast_object_list(decided, device=world.device if world.backend == "nccl" else None)
    (start,) = decided
    if not isinstance(start, Start):
        raise CannotRunError(start)
    return start


def whole_at(path: Path) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint at a path, or the newest whole one below it; its manifest; what was passed over, for people.

    A damaged one that is named itself is an error: another one would not be what was asked for. Raises CannotRunError.
    """
    if (path / COMPLETE).exists() or step_of(path) is not None:
        try:
            return path, checked(path), []
        except DamagedError as error:
            raise CannotRunError(f"{path} is damaged: {error}{_instead(path)}") from None
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    recover(folder)
    passed = [f"{one} was never finished" for one in unfinished_in(folder)]
    candidates = checkpoints_in(folder)
    for candidate in candidates:
        try:
            return candidate, checked(candidate), passed
        except DamagedError as error:
            passed.append(f"{candidate} is damaged: {error}")
    if not candidates:
        raise NoCheckpointError("; ".join([f"{folder} holds no checkpoint", *passed]))
    raise CannotRunError("\n".join([f"{folder}: none of {len(candidates)} checkpoints is whole", *passed]))


def read_file(path: Path, place: str, take: Callable[[Mapping[str, Any]], T]) -> T:
    """Out of a checkpoint_step<k>.pt, as versions before these folders wrote it. Raises CannotRunError for others."""
    try:
        # Mapped, so that only what is taken is read.
        return take(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (OSError, RuntimeError, UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise CannotRunError(
            f"{place}{path}: not a checkpoint of nsa.train ({type(error).__name__}); give a folder step-<k> of a run, "
            "or a checkpoint_step<k>.pt of an older one"
        ) from error


class NoCheckpointError(CannotRunError):
    """No checkpoint was ever finished there."""


def _decided(settings: Settings) -> Start:
    resume = settings.resume
    if isinstance(resume, Path) and resume.is_file():
        return _from_file(resume, settings)
    try:
        path, manifest, passed = whole_at(resume if isinstance(resume, Path) else settings.out_dir)
    except NoCheckpointError as error:
        if resume is not Resume.AUTO:
            raise CannotRunError(f"--resume {resume}: {error}") from None
        return Start(said=(f"--resume auto: {error}: it starts from step 1",))
    except CannotRunError as error:
        raise CannotRunError("\n".join(f"--resume {resume}: {line}" for line in str(error).splitlines())) from None
    _same_shape(path, manifest.dimensions, settings)
    said = [*passed, f"goes on from {path}, written after step {manifest.step}"]
    said += differences(manifest.settings, decisive(settings))
    return Start(step=manifest.step, checkpoint=path, manifest=manifest, said=tuple(said))


def _from_file(path: Path, settings: Settings) -> Start:
    step, saved = read_file(path, "--resume ", lambda content: (int(content["step"]), content["dimensions"]))
    _same_shape(path, saved, settings)
    return Start(step=step, checkpoint=path, said=(f"goes on from {path}, written after step {step}",))


def _same_shape(path: Path, saved: Mapping[str, str], settings: Settings) -> None:
    if mistakes := list(dimensions_differ(saved, dimensions(settings.model))):
        raise CannotRunError("\n".join(f"--resume {path}: {mistake}" for mistake in mistakes))


def _instead(damaged: Path) -> str:
    for other in checkpoints_in(damaged.parent):
        try:
            checked(other)
        except DamagedError:
            continue
        return f"; {other} is whole"
    return "; no other one beside it is whole"
