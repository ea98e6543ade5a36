"""Removes secrets from a run's files: in place after they were written, and when the run is packed."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, BinaryIO

from nsa_harness.core.report import Trouble
from nsa_harness.errors import HarnessError, UsageError
from nsa_harness.supervisor.storage.adapters import map_ranks
from nsa_harness.supervisor.storage.record import learn_launch_secrets, load_spec, read_record, with_unredacted_plan
from nsa_harness.supervisor.storage.recordings import redact_recordings
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import SPEC, AttemptDir, RunDir
from nsa_harness.supervisor.storage.safe_directory import BALLAST, SafeDirectory

# The program's own logs and files are not redacted in place, and neither is spec.json, which is needed to repeat the
# run.
_ATTEMPT_FILES = (
    "watch.jsonl", "processes.jsonl", "interrupted", "command.txt", "job.s*", "env.json", "sources.json", "profile.txt",
    "verdict.json", "trace.json", "explanation.json",
    "dumps/*.json", "dumps/*.txt", "boards/*.json", "boards/*.jsonl", "boards/*.txt", "evidence/*.json", "repro/*",
    "rank*/raised.json", "rank*/flight.json", "rank*/looks.jsonl", "rank*/trouble.jsonl", "rank*/stacks.txt",
    "rank*/values.json",
    "rank*/experiment.jsonl",
)  # fmt: skip
_MAX_BYTES = 64 << 20
_SNAPSHOTS = "snapshot*.json"
_MAX_SNAPSHOT_BYTES = 1 << 30  # they grow with the number of ranks, 18 KB for each
_MAX_JSON_BYTES = 32 << 20  # of a document that is parsed at once


def redact_files(attempt: AttemptDir) -> tuple[Trouble, ...]:
    """Redact the files of one attempt, without following links. Return one note per failure."""
    paths = (path for pattern in _ATTEMPT_FILES for path in attempt.directory.list_files(attempt.path, pattern))
    return (*_redact(paths, attempt.directory, attempt.redaction), *redact_recordings(attempt))


def redact_run(run: RunDir) -> None:
    """Redact the files of all attempts of a run, and store the number of each secret."""
    if run.redaction.found_secrets:
        for attempt in run.attempts():
            redact_files(attempt)
            list(_redact([attempt.trace], run.directory, run.redaction))  # written again by each judgement
        list(_redact([run.events, run.log, run.search_probes, run.why], run.directory, run.redaction))
        run.directory.write(run.secrets, run.redaction.to_store())


def _redact(paths: Iterator[Path] | list[Path], directory: SafeDirectory, redaction: Redaction) -> Iterator[Trouble]:
    for path in paths:
        try:
            if not directory.is_file(path):
                continue
            is_snapshot = fnmatch(path.name, _SNAPSHOTS)
            most_bytes = _MAX_SNAPSHOT_BYTES if is_snapshot else _MAX_BYTES
            text = directory.read_whole_file(path, most_bytes).decode("utf-8", errors="surrogateescape")
            if is_snapshot and len(text) > _MAX_JSON_BYTES:
                clean = map_ranks(text, redaction.json)
            else:
                clean = redaction.json(text) if path.suffix in (".json", ".jsonl") else redaction.text(text)
            if clean != text:
                directory.write(path, clean)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            yield Trouble(what=path.name, why=f"it could not be redacted: {error}")


# Packing a run into one file.

_CHUNK_BYTES = 8 << 20
_OVERLAP_BYTES = 64 << 10  # end of a chunk without a line end that is read again: a value may continue after it


def write_bundle(run: RunDir, target: Path) -> int:
    """Pack a run's files, without secrets, into a private archive. Return their number. Raise UsageError on failure."""
    files = list(shareable_files(run))
    learn_all_secrets(run)
    with _new_bundle(target) as bundle:
        for path in files:
            _add(bundle, path, f"{run.run_id}/{path.relative_to(run.path)}", run)
    return len(files)


def write_texts(target: Path, texts: Mapping[str, bytes]) -> None:
    """Write files, whose contents have no secrets, to a new archive. Raise UsageError if it cannot be created."""
    with _new_bundle(target) as bundle:
        for name, data in texts.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            bundle.addfile(member, io.BytesIO(data))


def learn_all_secrets(run: RunDir) -> None:
    """Find the secrets in all files of the run, before the first file is packed."""
    learn_launches(run)
    for path in shareable_files(run):
        for text in _texts(run.directory, path):
            run.redaction.text(text)


@contextmanager
def _new_bundle(target: Path) -> Iterator[tarfile.TarFile]:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}; name another file with --to FILE") from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as bundle:
        yield bundle


def learn_launches(run: RunDir) -> None:
    with suppress(HarnessError):
        learn_launch_secrets(run, with_unredacted_plan(run, read_record(run)).plan)
    for attempt in run.attempts():
        with suppress(HarnessError):
            run.redaction.learn_launch(load_spec(attempt.spec, attempt.directory))


def shareable_files(run: RunDir) -> Iterator[Path]:
    """Yield the regular files of a run that can be packed into an archive, without links."""
    excluded_names = {SPEC, run.plan.name, run.secrets.name, run.lock.name, BALLAST}
    directories = [run.path]
    while directories:
        directory = directories.pop(0)
        directories += [
            child for child in run.directory.subdirectories(directory) if child not in (run.worktrees, run.mixtures)
        ]
        yield from (
            path
            for path in run.directory.list_files(directory, "*")
            if path.name not in excluded_names and run.directory.is_file(path)
        )


def _add(bundle: tarfile.TarFile, path: Path, name: str, run: RunDir) -> None:
    with tempfile.TemporaryFile() as clean:
        write_redacted(clean, path, run)
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = clean.tell(), int(path.lstat().st_mtime), 0o600
        clean.seek(0)
        bundle.addfile(member, clean)


def write_redacted(clean: IO[bytes], path: Path, run: RunDir) -> None:
    redaction = run.redaction
    if path.suffix in (".json", ".jsonl") and path.lstat().st_size <= _MAX_JSON_BYTES:
        clean.write(redaction.json("".join(_texts(run.directory, path))).encode("utf-8", "surrogateescape"))
        return
    for text in _texts(run.directory, path):
        if "\0" in text:  # a status file, in which every byte must keep its position
            data = text.encode("utf-8", "surrogateescape")
            clean.write(redaction.mask(data))
        else:
            clean.write(redaction.text(text).encode("utf-8", "surrogateescape"))


def _texts(directory: SafeDirectory, path: Path) -> Iterator[str]:
    """Yield the text of a file in chunks, each consisting of whole lines if possible."""
    with directory.open_file(path) as file:
        for chunk in _chunks(file):
            yield chunk.decode("utf-8", "surrogateescape")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    remainder = b""
    while chunk := file.read(_CHUNK_BYTES):
        data = remainder + chunk
        end = data.rfind(b"\n") + 1 or data.rfind(b" ") + 1 or max(0, len(data) - _OVERLAP_BYTES)
        key = data.rfind(b"-----BEGIN ", max(0, end - _OVERLAP_BYTES), end)
        if key >= 0 and data.find(b"-----END ", key, end) < 0:  # a key of several lines must not be split
            end = key
        yield data[:end]
        remainder = data[end:]
    yield remainder
