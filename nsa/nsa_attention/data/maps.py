"""Rows of tokens from binary token files, in the format that `nsa.prepare` and nanoGPT write.

The files are read with `os.pread` and not memory-mapped, because a process is killed by SIGBUS if a mapped file
shrinks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..world import CannotRunError
from .packing import Row, row_of_window
from .problems import BadShardError, DataProblems, unreadable
from .tokens import Tokens

META = "meta.json"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
MOST_OPEN = 64  # number of token files that one loader keeps open
_CHECKED_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The meta.json of a data directory, which describes how its token files are encoded.

    The defaults apply to a directory without meta.json: 16-bit tokens, an unknown vocabulary and no end token.
    """

    dtype: str = "uint16"
    vocab: int | None = None
    end: int | None = None
    tokenizer: str | None = None


def read_meta(folder: Path) -> Meta:
    """Read the meta.json of a data directory, or return defaults if there is none.

    Raises CannotRunError if the file cannot be read or is not what `nsa.prepare` writes.
    """
    path = folder / META
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        meta = Meta(**{name: content.get(name) for name in ("dtype", "vocab", "end", "tokenizer")})
        if meta.dtype not in DTYPES or not isinstance(meta.vocab, int) or not isinstance(meta.end, int | None):
            raise ValueError("expected dtype uint16 or uint32, vocab and end")
    except FileNotFoundError:
        return Meta()
    except (OSError, ValueError, AttributeError) as error:
        raise CannotRunError(f"{path}: not what nsa.prepare writes ({error}); run it again") from error
    return meta


class _OpenFile:
    """An open file, which is closed when no thread refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class TokenFile:
    """A binary file of token ids."""

    def __init__(self, path: Path, meta: Meta, vocab: int, open_file: Callable[[Path], _OpenFile] = _OpenFile) -> None:
        """Check the token file at `path`. Each read calls `open_file`, which may return a file that is already open.

        Raises BadShardError if the tokens cannot be read or exceed the vocabulary, and CannotRunError if there is no
        meta.json and the file contains integers wider than uint16.
        """
        self.path, self._open, self._dtype = path, open_file, np.dtype(DTYPES[meta.dtype]).newbyteorder("<")
        try:
            file = self._open(path)
            size = os.fstat(file.descriptor).st_size
            os.pread(file.descriptor, 1, 0)
        except OSError as error:
            raise unreadable(error) from error
        if size == 0:
            raise BadShardError("is empty")
        if size % self._dtype.itemsize:
            raise BadShardError(f"its {size} bytes are not a whole number of {meta.dtype} tokens")
        self.tokens = size // self._dtype.itemsize
        if meta.vocab is None or meta.vocab > vocab:
            self._check(vocab, is_described=meta.vocab is not None)

    def read(self, first: int, count: int) -> Tokens:
        """Return `count` tokens, starting at position `first`. Raise BadShardError if they cannot be read."""
        width = self._dtype.itemsize
        try:
            file = self._open(self.path)
            content = os.pread(file.descriptor, count * width, first * width)
        except OSError as error:
            raise unreadable(error) from error
        if len(content) < count * width:
            remaining = os.fstat(file.descriptor).st_size // width
            raise BadShardError(f"has shrunk from {self.tokens} tokens to {remaining}")
        return np.frombuffer(content, self._dtype)

    def has_tokens(self, count: int) -> bool:
        """Return whether the first `count` tokens can be read."""
        try:
            return len(self.read(0, count)) == count
        except BadShardError:
            return False

    def _check(self, vocab: int, *, is_described: bool) -> None:
        """Read the whole file, and raise BadShardError if it contains a token outside the vocabulary."""
        for first in range(0, self.tokens, _CHECKED_AT_ONCE):
            part = self.read(first, min(_CHECKED_AT_ONCE, self.tokens - first))
            if not (is_described or first):
                self._check_width(part, vocab)
            if (highest := int(part.max())) >= vocab:
                place = first + int(part.argmax())
                raise BadShardError(f"token {place} is {highest}, and the vocabulary of the model is {vocab}")

    def _check_width(self, part: Tokens, vocab: int) -> None:
        """Raise CannotRunError if `part`, the start of the file, consists of integers wider than uint16."""
        # If they were read as 16-bit tokens, half of all tokens (or three quarters, of 64-bit integers) would be 0.
        for bits, remedy in ((64, "convert them to uint32 and write"), (32, "write")):
            words = part[: len(part) // 4 * 4].view(f"<u{bits // 8}")
            if words.any() and int(words.max()) < vocab:
                raise CannotRunError(
                    f"--data: {self.path}: its tokens are {bits}-bit integers, and without meta.json, 16-bit tokens "
                    f'are expected; {remedy} {self.path.with_name(META)}: {{"dtype": "uint32", "vocab": {vocab}}}'
                )


class TokenWindows:
    """A data source that reads windows of T + 1 tokens from token files, in a new random order in each epoch.

    Consecutive windows of a file overlap by one token.
    """

    def __init__(self, paths: Sequence[Path], vocab: int, problems: DataProblems, *, length: int, seed: int) -> None:
        """Open the token files, which must be in one directory. `length` is T, the number of input tokens per row.

        Raises CannotRunError if no file contains a whole window, if the tokens exceed the vocabulary, or if a file
        cannot be used and `--bad-shards` is `stop`.
        """
        self._problems, self._length, self._seed = problems, length, seed
        meta = read_meta(paths[0].parent)
        if any(path.parent != paths[0].parent for path in paths):
            raise CannotRunError(
                "--data: token files from more than one directory; each directory has its own meta.json"
            )
        if meta.vocab is not None and meta.vocab > vocab:
            raise CannotRunError(
                f"--data {paths[0].parent}: tokens from a vocabulary of {meta.vocab}, the model has {vocab}"
            )
        self._end, self._tokenizer = meta.end, meta.tokenizer
        self._open_file = lru_cache(MOST_OPEN)(_OpenFile)
        self.documents = meta.end is not None
        self._files: list[TokenFile] = []
        for path in paths:
            self._open(path, meta, vocab)
        counts = [(file.tokens - 1) // length for file in self._files]
        self._bounds = np.cumsum([0, *counts])
        self._windows = int(self._bounds[-1])
        self._order: tuple[int, Any] | None = None
        if not self._windows:
            raise CannotRunError(f"--data: the files contain no window of {length + 1} tokens; {problems.sentence()}")

    def _open(self, path: Path, meta: Meta, vocab: int) -> None:
        try:
            file = TokenFile(path, meta, vocab, self._open_file)
            if file.tokens <= self._length:
                raise BadShardError(f"its {file.tokens} tokens are too few for sequences of {self._length}")
            self._files.append(file)
        except BadShardError as error:
            self._problems.shard(str(path), str(error))

    def identity(self) -> dict[str, Any]:
        sizes = [f"{file.path.name} {file.tokens}" for file in self._files]
        return {"files": sizes, "tokenizer": self._tokenizer, "seq_len": self._length}

    def position(self) -> dict[str, Any]:
        return {}

    def go_to(self, position: dict[str, Any]) -> None:
        """Do nothing, because a row depends only on its number."""

    def row(self, number: int) -> Row:
        """Return row `number` of the shuffled order. If it cannot be read, return a row without any valid target.

        Raises CannotRunError if no file can be read, or if this row cannot be read and `--bad-shards` is `stop`.
        """
        # Another row is no substitute for an unreadable one, because the model would be trained on it twice.
        epoch, place = divmod(number, self._windows)
        window = int(self._permutation(epoch)[place])
        index = int(np.searchsorted(self._bounds, window, side="right")) - 1
        file, size = self._files[index], self._length + 1
        try:
            return row_of_window(file.read((window - int(self._bounds[index])) * self._length, size), self._end)
        except BadShardError as error:
            self._problems.row(str(file.path), str(error))
        if not any(file.has_tokens(size) for file in self._files):
            raise CannotRunError(f"--data: no window can be read; {self._problems.sentence()}")
        return Row(np.zeros(size, np.uint16), lengths=(self._length,), goes_on=True, counts=False)

    def close(self) -> None:
        """Close the token files."""
        self._open_file.cache_clear()

    def _permutation(self, epoch: int) -> Any:
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._windows)
        return order[1]
