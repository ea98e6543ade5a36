"""Rows of tokens that lie ready in files: a number each of 16 or 32 bits, as `nsa.prepare` and nanoGPT write them.

The files are read in place. No memory is mapped: of a mapped file that shrinks the process dies without a word.
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
from .tokens import Tokens
from .trouble import BadShardError, Trouble

META = "meta.json"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
_CHECKED_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What the numbers of a folder mean. Without a file that says it: 16 bits, and no token ends a document."""

    dtype: str = "uint16"
    vocab: int | None = None
    end: int | None = None
    tokenizer: str | None = None


def read_meta(folder: Path) -> Meta:
    """Raises CannotRunError for a file that says something else."""
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
    """One file of tokens, open for reading."""

    def __init__(self, path: Path, meta: Meta, vocab: int) -> None:
        """Raises BadShardError for what cannot be trained on."""
        self.path, self._dtype = path, np.dtype(DTYPES[meta.dtype]).newbyteorder("<")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
            os.pread(self._descriptor, 1, 0)
        except FileNotFoundError as error:
            raise BadShardError("has vanished") from error
        except OSError as error:
            raise BadShardError(f"cannot be read ({error.strerror})") from error
        if size == 0:
            raise BadShardError("is empty")
        if size % self._dtype.itemsize:
            raise BadShardError(f"its {size} bytes are no whole number of {meta.dtype} tokens")
        self.tokens = size // self._dtype.itemsize
        if meta.vocab is None or meta.vocab > vocab:
            self._check(vocab)

    def read(self, first: int, count: int) -> Tokens:
        """Raises BadShardError where the file has shrunk or cannot be read."""
        width = self._dtype.itemsize
        try:
            content = os.pread(self._descriptor, count * width, first * width)
        except OSError as error:
            raise BadShardError(f"cannot be read ({error.strerror})") from error
        if len(content) < count * width:
            left = os.fstat(self._descriptor).st_size // width
            raise BadShardError(f"has shrunk from {self.tokens} tokens to {left}")
        return np.frombuffer(content, self._dtype)

    def close(self) -> None:
        os.close(self._descriptor)

    def _check(self, vocab: int) -> None:
        """Nobody has promised that the tokens are of this vocabulary: look at all of them, once."""
        for first in range(0, self.tokens, _CHECKED_AT_ONCE):
            part = self.read(first, min(_CHECKED_AT_ONCE, self.tokens - first))
            if (highest := int(part.max())) >= vocab:
                place = first + int(part.argmax())
                raise BadShardError(f"token {place} is {highest}, and the vocabulary of the model is {vocab}")


class Maps:
    """All windows of T + 1 tokens of the files, in an order that is shuffled anew for each epoch."""

    def __init__(self, paths: Sequence[Path], vocab: int, trouble: Trouble, *, length: int, seed: int) -> None:
        """Raises CannotRunError if there is no window, or a bad file stops the run."""
        self._trouble, self._length, self._seed = trouble, length, seed
        meta = read_meta(paths[0].parent)
        if any(path.parent != paths[0].parent for path in paths):
            raise CannotRunError("--data: files of tokens of several folders; each folder has a meta.json of its own")
        if meta.vocab is not None and meta.vocab > vocab:
            raise CannotRunError(
                f"--data {paths[0].parent}: tokens of a vocabulary of {meta.vocab}, the model has {vocab}"
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
            raise CannotRunError(f"--data: no window of {length + 1} tokens; {trouble.sentence()}")

    def _open(self, path: Path, meta: Meta, vocab: int) -> None:
        try:
            file = TokenFile(path, meta, vocab)
            if file.tokens <= self._length:
                raise BadShardError(f"its {file.tokens} tokens are too few for sequences of {self._length}")
            self._files.append(file)
        except BadShardError as error:
            self._trouble.shard(str(path), str(error))

    def identity(self) -> dict[str, Any]:
        sizes = [f"{file.path.name} {file.tokens}" for file in self._files]
        return {"files": sizes, "tokenizer": self._tokenizer, "seq_len": self._length}

    def position(self) -> dict[str, Any]:
        return {}

    def go_to(self, position: dict[str, Any]) -> None:
        """The number of a row says it all."""

    def row(self, number: int) -> Row:
        """The window of that number; in the place of one that can no longer be read, the next one in the order."""
        for attempt in range(self._windows):
            epoch, place = divmod(number + attempt, self._windows)
            window = int(self._permutation(epoch)[place])
            file = self._files[int(np.searchsorted(self._bounds, window, side="right")) - 1]
            first = (window - int(self._bounds[self._files.index(file)])) * self._length
            try:
                return row_of_window(file.read(first, self._length + 1), self._end)
            except BadShardError as error:
                self._trouble.row(str(file.path), str(error))
        raise CannotRunError(f"--data: no window can be read any more; {self._trouble.sentence()}")

    def close(self) -> None:
        """The last thing that is asked of them."""
        while self._files:
            self._files.pop().close()

    def _permutation(self, epoch: int) -> Any:
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._windows)
        return order[1]
