"""Shards of training data: local text files, or splits of Hugging Face data sets."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from ..world import CannotRunError
from .problems import BadRecordError, BadShardError, unreadable

# A text file is cut into documents of about this many bytes, at the end of a line.
LONGEST_TEXT = 1 << 20
_READ = 1 << 16

Record = str | BadRecordError
OnOpen = Callable[[IO[bytes]], None]


class Shard(Protocol):
    """A part of a data set, such as a file. Its records are read in order."""

    @property
    def name(self) -> str: ...

    def identity(self) -> str:
        """Return a string that identifies the shard's content. A resumed run uses it to detect changed data."""

    def records(self) -> Iterator[Record]:
        """Yield the text of each record, or a BadRecordError for a record without usable text.

        Raises BadShardError if the rest of the shard cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class FileShard:
    """A local text, JSON Lines or parquet file, optionally compressed with gzip or zstd."""

    path: Path
    text_field: str
    on_open: OnOpen | None = None  # called with the open binary file, for example to show progress

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        try:
            return f"{self.path.name} {self.path.stat().st_size}"
        except OSError:
            return f"{self.path.name} gone"

    def records(self) -> Iterator[Record]:
        is_compressed = self.path.suffix in (".gz", ".zst")
        read = _READERS[(self.path.with_suffix("") if is_compressed else self.path).suffix]
        try:
            yield from read(self.path, self.text_field, self.on_open)
        except EOFError as error:
            raise BadShardError("ends in the middle of its compressed content") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadShardError(f"its compressed content is damaged ({error})") from error
        except OSError as error:
            raise unreadable(error) from error


def _texts(path: Path, _field: str, on_open: OnOpen | None) -> Iterator[Record]:
    """Yield the text of a file in parts of about LONGEST_TEXT bytes, cut at line ends."""
    with _open_decompressed(path, on_open) as file:
        while lines := file.readlines(LONGEST_TEXT):
            yield _decode(b"".join(lines))


def _lines(path: Path, field: str, on_open: OnOpen | None) -> Iterator[Record]:
    with _open_decompressed(path, on_open) as file:
        for line in file:
            if line.strip():
                yield _text_of(line, field)


def _text_of(line: bytes, field: str) -> Record:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecordError(f"is not UTF-8 (byte {error.start} of the line)")
    except ValueError as error:
        return BadRecordError(f"is not JSON ({error})")
    if not isinstance(content, dict):
        return BadRecordError(f"is not a JSON object but {type(content).__name__}")
    if field not in content:
        return BadRecordError(f'has no field "{field}", only {", ".join(map(str, content)) or "nothing"}')
    return _text(content[field], field)


def _text(value: Any, field: str) -> Record:
    if not isinstance(value, str):
        return BadRecordError(f'field "{field}" is not a string but {type(value).__name__}')
    return value


def _decode(content: bytes) -> Record:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecordError(f"is not UTF-8 (byte {error.start} of the text)")


def _parquet(path: Path, field: str, on_open: OnOpen | None) -> Iterator[Record]:
    parquet = import_optional("pyarrow.parquet", path)
    errors = import_optional("pyarrow", path).ArrowException
    try:
        with _raw(path, on_open) as raw, parquet.ParquetFile(raw) as file:
            if field not in (names := file.schema_arrow.names):
                raise BadShardError(f'has no column "{field}", only {", ".join(names) or "nothing"}')
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _text(value, field)
    except errors as error:
        raise BadShardError(f"is not a parquet file or is damaged ({_first_line(error)})") from error


@contextmanager
def _raw(path: Path, on_open: OnOpen | None) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        if on_open is not None:
            on_open(file)
        yield file


@contextmanager
def _open_decompressed(path: Path, on_open: OnOpen | None) -> Iterator[IO[bytes]]:
    with _raw(path, on_open) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        elif path.suffix == ".zst":
            yield io.BufferedReader(_ZstdStream(raw, import_optional("zstandard", path)), _READ)
        else:
            yield raw


class _ZstdStream(io.RawIOBase):
    """A stream that decompresses a zstd file and raises EOFError if the file is truncated.

    The stream reader of the zstandard package does not report a truncated file.
    """

    def __init__(self, compressed: IO[bytes], library: Any) -> None:
        self._compressed, self._library = compressed, library
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._compressed.read(_READ)
            if not block:
                if self._frame is not None:
                    raise EOFError("the frame is not complete")
                return 0
            self._decompress(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> None:
        try:
            while block:
                self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
                self._ready += self._frame.decompress(block)
                block = b""
                if self._frame.eof:
                    block, self._frame = self._frame.unused_data, None
        except self._library.ZstdError as error:
            raise BadShardError(f"its compressed content is damaged ({error})") from error


def import_optional(module: str, for_what: object) -> Any:
    """Import and return a module of an optional package. Raise CannotRunError if the package is not installed.

    The error message names `for_what`, the option or file that needs the package, and the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CannotRunError(f"{for_what}: needs {package}; pip install 'nsa-harness[data]'") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_READERS = {".txt": _texts, ".jsonl": _lines, ".parquet": _parquet}
TEXT_ENDINGS = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TOKEN_ENDING = ".bin"


def has_ending(path: Path, *endings: str) -> bool:
    """Return whether the file name ends with any of `endings`."""
    return path.name.endswith(endings)


def files_at(source: Path) -> list[Path]:
    """Return the data files for `source`, a file, directory or glob pattern, sorted by name.

    Only files with a known ending are returned from a directory, and neither subdirectories nor held-out files (val*,
    test*). Raises CannotRunError if no file matches, or if token files and text files are mixed.
    """
    endings = (*TEXT_ENDINGS, TOKEN_ENDING)
    if source.is_dir():
        paths = sorted(path for path in source.iterdir() if has_ending(path, *endings) and not _is_held_out(path))
    elif source.exists() or not set("*?[") & set(str(source)):
        paths = [source]
    else:
        paths = sorted(path for path in map(Path, glob.glob(str(source), recursive=True)) if has_ending(path, *endings))
    kinds = {has_ending(path, TOKEN_ENDING) for path in paths}
    if not paths:
        raise CannotRunError(f"--data {source}: no file that ends with {', '.join(endings)}")
    if len(kinds) > 1:
        raise CannotRunError(f"--data {source}: contains token files (.bin) and text files; select one kind")
    return paths


def _is_held_out(path: Path) -> bool:
    return path.name.startswith(("val", "test"))


@dataclass(frozen=True, kw_only=True)
class HubShard:
    """One split of a Hugging Face data set, streamed by the package `datasets`."""

    path: str
    config: str | None
    split: str
    text_field: str

    @property
    def name(self) -> str:
        return ":".join(part for part in ("hf", self.path, self.config, self.split) if part)

    def identity(self) -> str:
        return self.name

    def records(self) -> Iterator[Record]:
        library = import_optional("datasets", f"--data {self.name}")
        try:
            for example in library.load_dataset(self.path, self.config, split=self.split, streaming=True):
                if self.text_field not in example:
                    names = ", ".join(example) or "nothing"
                    raise BadShardError(f'has no column "{self.text_field}", only {names}')
                yield _text(example[self.text_field], self.text_field)
        except BadShardError:
            raise
        except Exception as error:  # the package raises many types of exceptions for network, hub and file errors
            raise BadShardError(f"cannot be read ({type(error).__name__}: {_first_line(error)})") from error
