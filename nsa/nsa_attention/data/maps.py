"""Rows of tokens from binary files in the format that `nsa.prepare` and nanoGPT write.

The files are read with `os.pread` and not memory-mapped, because a process is killed by SIGBUS if a mapped file
shrinks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..world import CannotRunError
from .packing import Row, row_of_window
from .problems import BadShardError, DataProblems
from .tokens import Tokens

META = "meta.json"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
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


class TokenFile:
    """A binary file of token ids, open for reading."""

    def __init__(self, path: Path, meta: Meta, vocab: int) -> None:
        """Open the token file `path`. Raise BadShardError if its tokens cannot be read or exceed the vocabulary."""
        self.path, self._dtype = path, np.dtype(DTYPES[meta.dtype]).newbyteorder("<")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
            os.pread(self._descriptor, 1, 0)
        except FileNotFoundError as error:
            raise BadShardError("does not exist any more") from error
        except OSError as error:
            raise BadShardError(f"cannot be read ({error.strerror})") from error
        if size == 0:
            raise BadShardError("is empty")
        if size % self._dtype.itemsize:
            raise BadShardError(f"its {size} bytes are not a whole number of {meta.dtype} tokens")
        self.tokens = size // self._dtype.itemsize
        if meta.vocab is None or meta.vocab > vocab:
            self._check(vocab)

    def read(self, first: int, count: int) -> Tokens:
        """Return `count` tokens, starting at position `first`. Raise BadShardError if they cannot be read."""
        width = self._dtype.itemsize
        try:
            content = os.pread(self._descriptor, count * width, first * width)
        except OSError as error:
            raise BadShardError(f"cannot be read ({error.strerror})") from error
        if len(content) < count * width:
            remaining = os.fstat(self._descriptor).st_size // width
            raise BadShardError(f"has shrunk from {self.tokens} tokens to {remaining}")
        return np.frombuffer(content, self._dtype)

    def close(self) -> None:
        os.close(self._descriptor)

    def _check(self, vocab: int) -> None:
        """Read the whole file, and raise BadShardError if it contains a token outside the vocabulary."""
        for first in range(0, self.tokens, _CHECKED_AT_ONCE):
            part = self.read(first, min(_CHECKED_AT_ONCE, self.tokens - first))
            if (highest := int(part.max())) >= vocab:
                place = first + int(part.argmax())
                raise BadShardError(f"token {place} is {highest}, and the vocabulary of the model is {vocab}")


class TokenWindows:
    """A data source that reads windows of T + 1 tokens from token files, in a new random order in each epoch.

    Consecutive windows of a file overlap by one token.
    """

    def __init__(self, paths: Sequence[Path], vocab: int, problems: DataProblems, *, length: int, seed: int) -> None:
        """Open the token files, which must be in one directory. `length` is T, the number of input tokens per row.

        Raises CannotRunError if the files have no window, do not fit the vocabulary, or if one of them is unusable and
        the settings say that a bad shard stops the run.
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
            file = TokenFile(path, meta, vocab)
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
        """Return row `number` of the shuffled order, or the next readable row if that row is damaged.

        Raises CannotRunError if no row is readable, or if the settings say that unreadable rows stop the run.
        """
        for attempt in range(self._windows):
            epoch, place = divmod(number + attempt, self._windows)
            window = int(self._permutation(epoch)[place])
            file = self._files[int(np.searchsorted(self._bounds, window, side="right")) - 1]
            first = (window - int(self._bounds[self._files.index(file)])) * self._length
            try:
                return row_of_window(file.read(first, self._length + 1), self._end)
            except BadShardError as error:
                self._problems.row(str(file.path), str(error))
        raise CannotRunError(f"--data: no window can be read; {self._problems.sentence()}")

    def close(self) -> None:
        """Close the token files."""
        while self._files:
            self._files.pop().close()

    def _permutation(self, epoch: int) -> Any:
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._windows)
        return order[1]
