"""Checkpoints on disk, each a directory `step-<k>` with a manifest and checksums.

A checkpoint is written to `step-<k>.writing`. The manifest is written last, and then the directory is renamed to
`step-<k>`. A `step-<k>` directory is therefore always complete, even if processes are killed while they write. The
checksums detect files that were damaged later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..world import CannotRunError

# Name of the directory of checkpoints in the output directory; torchtitan uses the same name.
FOLDER = "checkpoint"
COMPLETE = "complete.json"
# The format of a checkpoint. In every format, complete.json is {"manifest": {"format": ...}, "sha256": ...}, so that an
# older version of this package can distinguish a newer format from a damaged file.
_FORMAT = 1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME = re.compile(r"step-(\d+)")
_WRITING, _REMOVING, _SET_ASIDE = ".writing", ".removing", ".set-aside"


class DamagedError(Exception):
    """Raised if a checkpoint is incomplete or its files differ from what was written."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """The size and checksum of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, stored in the checkpoint's `complete.json`."""

    step: int
    world_size: int
    dimensions: Mapping[str, str]  # the model's dimensions, as in shape.dimensions
    settings: Mapping[str, str]  # other settings that influence the training, as in save.influential_settings
    scaler: Mapping[str, Any]
    files: Mapping[str, FileDigest]


def digest_of(path: Path) -> FileDigest:
    """Return the size and SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return FileDigest(size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def writing_path(folder: Path, step: int) -> Path:
    """Return the temporary directory in which the checkpoint of `step` is written."""
    return folder / f"step-{step}{_WRITING}"


def create_empty(aside: Path) -> None:
    """Create the empty directory `aside`, after removing any existing one."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def finish(aside: Path, manifest: Manifest) -> Path:
    """Write the manifest to `aside`, rename this directory to its final name, and return the new path."""
    draft = aside / f"{COMPLETE}.tmp"
    write_durably(draft, _text(manifest))
    draft.rename(aside / COMPLETE)
    _sync(aside)
    target = aside.with_name(aside.name.removesuffix(_WRITING))
    if target.exists():
        _remove(target)
    aside.rename(target)
    _sync(target.parent)
    return target


def recover(folder: Path) -> None:
    """Rename complete checkpoints that a killed process left under their temporary names."""
    for aside in unfinished_in(folder):
        target = aside.with_name(aside.name.removesuffix(_WRITING))
        if (aside / COMPLETE).exists() and not target.exists():
            with suppress(OSError):  # the directory may be read-only
                aside.rename(target)


def write_durably(path: Path, text: str) -> None:
    """Write `text` to a file, and wait until it is on disk."""
    content = text.encode()
    with lack_of_space_named(path, len(content)), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lack_of_space_named(path: Path, size_bytes: int | None = None) -> Iterator[None]:
    """Raise an OSError that names `path` and the free space if the `with` block fails because the disk is full.

    `size_bytes` is the number of bytes that the block writes, or None if it is not known.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    try:
        yield
    except Exception as error:
        # torch.save raises RuntimeError ("unexpected pos 704 vs 598") while it handles the OSError.
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in _NO_SPACE):
            cause = cause.__context__
        if cause is None:
            raise
        to_write = "" if size_bytes is None else f"{size_bytes} bytes to write, "
        raise OSError(f"{path}: {cause.strerror} ({to_write}{free_bytes} bytes free)") from error


def verify(checkpoint: Path) -> Manifest:
    """Check all files of a checkpoint against its manifest, and return the manifest.

    Raises DamagedError if a file is missing or has changed, or if the manifest is damaged, and CannotRunError if this
    version of the package does not support the format of the checkpoint.
    """
    manifest = manifest_of(checkpoint)
    for name, expected in manifest.files.items():
        path = checkpoint / name
        try:
            actual = digest_of(path)
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if actual.size_bytes != expected.size_bytes:
            raise DamagedError(f"{name}: {actual.size_bytes} bytes instead of {expected.size_bytes}")
        if actual != expected:
            raise DamagedError(f"{name}: its checksum differs from the manifest")
    return manifest


def manifest_of(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, without checking the files it lists.

    Raises DamagedError if the manifest is missing or damaged, and CannotRunError if its format is not supported.
    """
    try:
        text = (checkpoint / COMPLETE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedError(
            f"{COMPLETE} is missing: the checkpoint was never finished, or this is not a checkpoint"
        ) from None
    except (OSError, UnicodeDecodeError):
        raise DamagedError(f"{COMPLETE} cannot be read") from None
    try:
        content, stored_sum = json.loads(text)["manifest"], json.loads(text)["sha256"]
        if _sum(content) != stored_sum:
            raise ValueError
        if (saved_format := content.pop("format")) != _FORMAT:
            raise CannotRunError(
                f"{checkpoint} has format {saved_format}, and this version reads format {_FORMAT}; use a newer version"
            )
        files = {name: FileDigest(**digest) for name, digest in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DamagedError(f"{COMPLETE} is damaged") from None
    step = step_of(checkpoint)
    if step not in (None, manifest.step):
        raise DamagedError(f"{COMPLETE} belongs to step {manifest.step}")
    return manifest


def step_of(path: Path) -> int | None:
    """Return the step in a directory name such as `step-100`, or None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a directory, in descending order of step.

    Damaged checkpoints are included. The list is empty if `folder` does not exist.
    """
    checkpoints = [(step, path) for path in _entries(folder) if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(checkpoints, reverse=True)]


def unfinished_in(folder: Path) -> list[Path]:
    """Return the directories of unfinished checkpoints in `folder`."""
    return [path for path in _entries(folder) if path.name.endswith(_WRITING)]


def keep_newest(folder: Path, count: int) -> None:
    """Remove all finished checkpoints in `folder` except the latest `count`."""
    for path in checkpoints_in(folder)[count:]:
        _remove(path)


def tidy(folder: Path, done: int) -> Iterator[str]:
    """Clean up `folder` before a run resumes after step `done`. Yield a message for each checkpoint that is renamed."""
    # Unfinished and half-removed directories are deleted. Checkpoints of later steps belong to a different training
    # history. They are renamed to `step-<k>.set-aside`, so that no run resumes from them.
    for path in _entries(folder):
        if path.name.endswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints_in(folder):
        if int(path.name.partition("-")[2]) > done:
            aside = path.with_name(path.name + _SET_ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            yield f"{path} is later than step {done}, after which this run continues; renamed to {aside.name}"


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint and then delete it, so that no other process finds a partly deleted checkpoint."""
    removing = checkpoint.with_name(checkpoint.name + _REMOVING)
    shutil.rmtree(removing, ignore_errors=True)
    checkpoint.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def _text(manifest: Manifest) -> str:
    content = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"manifest": content, "sha256": _sum(content)}, indent=1) + "\n"


def _sum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
