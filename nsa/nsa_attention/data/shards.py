"""The shards of a data set: local files by their endings, and how the records of one are read, one after the other."""

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
from .trouble import BadRecordError, BadShardError

# A text file is cut into documents of about this many bytes, at the end of a line.
LONGEST_TEXT = 1 << 20
_READ = 1 << 16

Record = str | BadRecordError
Watch = Callable[[IO[bytes]], None]


class Shard(Protocol):
    """A part of a data set that is read from its beginning to its end."""

    @property
    def name(self) -> str: ...

    def identity(self) -> str:
        """By which the same shard is known again."""

    def records(self) -> Iterator[Record]:
        """Texts, and errors in the place of what is none. Raises BadShardError where the rest cannot be read."""


@dataclass(frozen=True, kw_only=True)
class FileShard:
    """A local file of texts."""

    path: Path
    text_field: str
    watch: Watch | None = None  # is given the file once it is open

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        try:
            return f"{self.path.name} {self.path.stat().st_size}"
        except OSError:
            return f"{self.path.name} gone"

    def records(self) -> Iterator[Record]:
        packed = self.path.suffix in (".gz", ".zst")
        read = _READERS[(self.path.with_suffix("") if packed else self.path).suffix]
        try:
            yield from read(self.path, self.text_field, self.watch)
        except FileNotFoundError as error:
            raise BadShardError("has vanished") from error
        except EOFError as error:
            raise BadShardError("ends in the middle of its packed content") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadShardError(f"packed content is damaged ({error})") from error
        except OSError as error:
            raise BadShardError(f"cannot be read ({error.strerror or error})") from error


def _texts(path: Path, _field: str, watch: Watch | None) -> Iterator[Record]:
    """Whole lines, so that no character is cut."""
    with _opened(path, watch) as file:
        while lines := file.readlines(LONGEST_TEXT):
            yield _decoded(b"".join(lines))


def _lines(path: Path, field: str, watch: Watch | None) -> Iterator[Record]:
    with _opened(path, watch) as file:
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
        return BadRecordError(f"is no object but {type(content).__name__}")
    if field not in content:
        return BadRecordError(f'has no field "{field}", only {", ".join(map(str, content)) or "nothing"}')
    return _text(content[field], field)


def _text(value: Any, field: str) -> Record:
    if not isinstance(value, str):
        return BadRecordError(f'field "{field}" is no text but {type(value).__name__}')
    return value


def _decoded(content: bytes) -> Record:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecordError(f"is not UTF-8 (byte {error.start} of it)")


def _parquet(path: Path, field: str, watch: Watch | None) -> Iterator[Record]:
    parquet = needed("pyarrow.parquet", path)
    errors = needed("pyarrow", path).ArrowException
    try:
        with _raw(path, watch) as opened, parquet.ParquetFile(opened) as file:
            if field not in (names := file.schema_arrow.names):
                raise BadShardError(f'has no column "{field}", only {", ".join(names) or "nothing"}')
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _text(value, field)
    except errors as error:
        raise BadShardError(f"is no parquet file or a damaged one ({_first_line(error)})") from error


@contextmanager
def _raw(path: Path, watch: Watch | None) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        if watch is not None:
            watch(file)
        yield file


@contextmanager
def _opened(path: Path, watch: Watch | None) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked."""
    with _raw(path, watch) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        elif path.suffix == ".zst":
            yield io.BufferedReader(_Unpacked(raw, needed("zstandard", path)), _READ)
        else:
            yield raw


class _Unpacked(io.RawIOBase):
    """A zstd file as its content. zstandard's own reader takes a file that ends early for one that ends."""

    def __init__(self, packed: IO[bytes], library: Any) -> None:
        self._packed, self._library = packed, library
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._packed.read(_READ)
            if not block:
                if self._frame is not None:
                    raise EOFError("the frame is not complete")
                return 0
            self._unpack(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self, block: bytes) -> None:
        """A file may be several frames."""
        try:
            while block:
                self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
                self._ready += self._frame.decompress(block)
                block = b""
                if self._frame.eof:
                    block, self._frame = self._frame.unused_data, None
        except self._library.ZstdError as error:
            raise BadShardError(f"packed content is damaged ({error})") from error


def needed(module: str, for_what: object) -> Any:
    """An optional package. Raises CannotRunError that names the extra."""
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
    return path.name.endswith(endings)


def files_at(source: Path) -> list[Path]:
    """The files that a path, a folder or a pattern names, by name. Raises CannotRunError for none.

    Left aside are folders below a folder, what has no known ending, and what is named as kept for validation.
    """
    known = (*TEXT_ENDINGS, TOKEN_ENDING)
    if source.is_dir():
        found = sorted(path for path in source.iterdir() if has_ending(path, *known) and not _is_held_out(path))
    elif source.exists() or not set("*?[") & set(str(source)):
        found = [source]
    else:
        found = sorted(path for path in map(Path, glob.glob(str(source), recursive=True)) if has_ending(path, *known))
    kinds = {has_ending(path, TOKEN_ENDING) for path in found}
    if not found:
        raise CannotRunError(f"--data {source}: no file that ends with {', '.join(known)}")
    if len(kinds) > 1:
        raise CannotRunError(f"--data {source}: has files of tokens (.bin) beside files of text; name one kind")
    return found


def _is_held_out(path: Path) -> bool:
    """As nanoGPT's val.bin."""
    return path.name.startswith(("val", "test"))


@dataclass(frozen=True, kw_only=True)
class HubShard:
    """A data set of the Hugging Face hub, or a local one that `datasets` reads, streamed."""

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
        library = needed("datasets", f"--data {self.name}")
        try:
            for example in library.load_dataset(self.path, self.config, split=self.split, streaming=True):
                if self.text_field not in example:
                    names = ", ".join(example) or "nothing"
                    raise BadShardError(f'has no column "{self.text_field}", only {names}')
                yield _text(example[self.text_field], self.text_field)
        except BadShardError:
            raise
        except Exception as error:  # whatever the network, the hub or a file makes the package raise
            raise BadShardError(f"cannot be read ({type(error).__name__}: {_first_line(error)})") from error
