"""Checkpoints on disk: `step-<k>` folders, the manifest that makes one complete, and which of them is whole.

A checkpoint is written as `step-<k>.writing` and renamed when its manifest, written last, is on disk. Whatever is
killed in between, no `step-<k>` is ever half a checkpoint; what a disk has damaged is found by its checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Below the output directory, under torchtitan's name for it.
FOLDER = "checkpoint"
COMPLETE = "complete.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_WRITING, _REMOVING, _SET_ASIDE = ".writing", ".removing", ".set-aside"


class DamagedError(Exception):
    """A checkpoint is not what was written; the text says what about it."""


@dataclass(frozen=True, kw_only=True)
class Seal:
    """By which a file is known again."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    world_size: int
    dimensions: Mapping[str, str]  # the weights depend on them
    settings: Mapping[str, str]  # what else the numbers of the run depend on
    scaler: Mapping[str, Any]
    files: Mapping[str, Seal]


def sealed(path: Path) -> Seal:
    with path.open("rb") as file:
        return Seal(size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def beside(folder: Path, step: int) -> Path:
    """Where the checkpoint of this step is while it is written."""
    return folder / f"step-{step}{_WRITING}"


def begin(aside: Path) -> None:
    """Make it, empty."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def finish(aside: Path, manifest: Manifest) -> Path:
    """Make complete what was written; returns the folder under its name."""
    unnamed = aside / f"{COMPLETE}.tmp"
    write_durably(unnamed, _text(manifest))
    unnamed.rename(aside / COMPLETE)
    _sync(aside)
    target = aside.with_name(aside.name.removesuffix(_WRITING))
    if target.exists():
        _remove(target)
    aside.rename(target)
    _sync(target.parent)
    return target


def recover(folder: Path) -> None:
    """Give their names to checkpoints that were complete when the process was killed."""
    for aside in unfinished_in(folder):
        target = aside.with_name(aside.name.removesuffix(_WRITING))
        if (aside / COMPLETE).exists() and not target.exists():
            with suppress(OSError):  # what may only be read is read as it is
                aside.rename(target)


def write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def checked(checkpoint: Path) -> Manifest:
    """The manifest of a whole checkpoint, every file of it read. Raises DamagedError with what is wrong."""
    manifest = manifest_of(checkpoint)
    for name, seal in manifest.files.items():
        path = checkpoint / name
        try:
            found = sealed(path)
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if found.size_bytes != seal.size_bytes:
            raise DamagedError(f"{name}: {found.size_bytes} bytes, {seal.size_bytes} were written")
        if found != seal:
            raise DamagedError(f"{name}: its checksum is not that of what was written")
    return manifest


def manifest_of(checkpoint: Path) -> Manifest:
    """Without its files. Raises DamagedError."""
    try:
        text = (checkpoint / COMPLETE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedError(f"{COMPLETE} is missing: it was never finished, or is no checkpoint") from None
    except (OSError, UnicodeDecodeError):
        raise DamagedError(f"{COMPLETE} cannot be read") from None
    try:
        content, stated = json.loads(text)["manifest"], json.loads(text)["sha256"]
        if _sum(content) != stated:
            raise ValueError
        if content.pop("format") != _FORMAT:
            raise DamagedError(f"{COMPLETE}: of a format that this version does not know")
        files = {name: Seal(**seal) for name, seal in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DamagedError(f"{COMPLETE} is not what was written") from None
    step = step_of(checkpoint)
    if step not in (None, manifest.step):
        raise DamagedError(f"{COMPLETE} is that of step {manifest.step}")
    return manifest


def step_of(path: Path) -> int | None:
    """By its name; None: it has another one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints_in(folder: Path) -> list[Path]:
    """The finished ones, newest first; damaged ones may be among them."""
    found = [(step, path) for path in _entries(folder) if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def unfinished_in(folder: Path) -> list[Path]:
    """Those whose writing was cut off."""
    return [path for path in _entries(folder) if path.name.endswith(_WRITING)]


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but so many."""
    for path in checkpoints_in(folder)[count:]:
        _remove(path)


def tidy(folder: Path, done: int) -> Iterator[str]:
    """Before a run that has done so many steps writes here: what stands in its way, and what was done about it.

    Later checkpoints are of another course of the training. They are kept under another name, so that they are neither
    counted as the newest ones nor gone on from.
    """
    for path in _entries(folder):
        if path.name.endswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints_in(folder):
        if int(path.name.partition("-")[2]) > done:
            aside = path.with_name(path.name + _SET_ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            yield f"{path} is later than step {done}, from which this run goes on; it is kept as {aside.name}"


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _remove(checkpoint: Path) -> None:
    """In one moment for whoever looks, however long its files take."""
    doomed = checkpoint.with_name(checkpoint.name + _REMOVING)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _text(manifest: Manifest) -> str:
    content = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"manifest": content, "sha256": _sum(content)}, indent=1) + "\n"


def _sum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """The names in it are on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
