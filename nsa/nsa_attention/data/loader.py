"""Batches of tokens for one rank: its rows of one order that all ranks share, and the position in it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Attention
from ..settings import Settings
from ..values import Data, Packing
from ..world import MAX_COMPARED, CannotRunError, World
from .maps import Maps
from .named import shards_of
from .packing import Row
from .prefetch import Ordered
from .shards import TEXT_ENDINGS, TOKEN_ENDING, files_at, has_ending
from .streams import Documents
from .tokens import BYTES, Tokenizer, tokenizer_named
from .trouble import Trouble
from .windows import Geometry, Windows

IGNORED = -100  # as torch's cross entropy has it
VERSION = 1
BATCHES_AHEAD = 4
WORKERS = 2

Source = Windows | Maps | Documents


class Batch(NamedTuple):
    """Inputs and targets [B, T]; the target of a token is the token after it, or IGNORED behind its document."""

    tokens: Tensor
    targets: Tensor
    lengths: tuple[int, ...] | None  # of the documents, row behind row; None: each row is one sequence
    counted: int  # targets that are not IGNORED, known without asking the device


class _Collated(NamedTuple):
    """A batch on the host."""

    tokens: NDArray[np.int64]  # [B, T + 1]
    targets: NDArray[np.int64]
    lengths: tuple[int, ...] | None
    position: dict[str, Any]  # where the source goes on behind it


class Batches:
    """What a rank trains on, batch after batch. Close it: it may have threads.

    Rows have one order for all ranks: a micro-batch takes the next rows for rank 0, then those for rank 1, and so on.
    Raises CannotRunError for data that cannot be trained on, here or with a later batch.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self._geometry = Geometry(world_size=world.size, accumulate=settings.accumulate, batch=settings.batch)
        self.trouble = Trouble(settings.bad_shards)
        self._source = self._opened()
        self.packing = self._decided_packing()
        self._row = 0
        self._position = self._source.position()  # not further than the newest batch that was given
        self._ahead: Ordered[range, _Collated] | None = None
        self._first: _Collated | None = None
        self.ready_s: float | None = None  # how long the first batch took; None: nobody has asked for it
        self.last_fetch_s = 0.0
        self.fetch_s = 0.0  # of all batches
        self.fetches = 0

    @property
    def workers(self) -> int:
        """Threads that work ahead. What is in memory needs none."""
        if self._settings.workers is not None:
            return self._settings.workers
        return 0 if self._draws_windows() else WORKERS

    def ready(self) -> float:
        """Seconds until the first batch is there, which `fetch` then gives."""
        started_s = time.perf_counter()
        if self._first is None:
            self._first = self._next()
        self.ready_s = time.perf_counter() - started_s
        return self.ready_s

    def fetch(self) -> Batch:
        """The next batch; `last_fetch_s` is how long this took."""
        started_s = time.perf_counter()
        collated, self._first = self._first or self._next(), None
        self._row += self._geometry.rows_of_micro_batch
        self._position = collated.position
        batch = self._on_device(collated)
        self.last_fetch_s = time.perf_counter() - started_s
        self.fetch_s += self.last_fetch_s
        self.fetches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the newest batch, as plain values. The same on every rank, for any world size."""
        return {"version": VERSION, **self._identity(), "row": self._row, "position": dict(self._position)}

    def digest(self) -> int:
        """Of that position, below MAX_COMPARED: one on all ranks as long as they read the same."""
        return zlib.crc32(repr(sorted(self._position.items())).encode()) % MAX_COMPARED

    def where(self) -> str:
        """The same for people."""
        return ", ".join(f"{name} {value}" for name, value in self._position.items())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises CannotRunError, with every difference, for a position in other data."""
        if state.get("version") != VERSION:
            raise CannotRunError(f"--resume: a position in the data of version {state.get('version')}, not {VERSION}")
        mistakes = [
            f"--resume: the position in the data is of {key} {_short(state.get(key))}, this run has {_short(value)}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if mistakes:
            raise CannotRunError("\n".join(mistakes))
        self._go_to(int(state["row"]), dict(state["position"]))

    def skip_steps(self, steps: int) -> None:
        """Go on behind so many steps of this run's geometry, where no position is known. A stream is read for it."""
        rows = steps * self._geometry.rows_of_step
        if isinstance(self._source, Documents):
            for _ in range(rows):
                self._source.next_row()
        self._go_to(self._row + rows, self._source.position())

    def introduction(self) -> str:
        """What is read and how, for people."""
        kind = {Windows: "windows drawn at random", Maps: "files of tokens", Documents: "documents"}[type(self._source)]
        return f"{kind}, packing {self.packing}, {self.workers} workers"

    def report(self) -> dict[str, Any]:
        """What became of the data, for a file."""
        return {
            "data": str(self._settings.data),
            "rank": self._world.rank,
            "packing": str(self.packing),
            "workers": self.workers,
            "ready_s": self.ready_s,
            "rows": self._row,
            "batches": self.fetches,
            "fetch_s": self.fetch_s,
            **self.trouble.summary(),
        }

    def close(self) -> None:
        """The threads end, and files are closed."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if not isinstance(self._source, Windows):
            self._source.close()

    def _identity(self) -> dict[str, Any]:
        kind = {Windows: "windows", Maps: "tokens", Documents: "documents"}[type(self._source)]
        return {"data": kind, "seed": self._settings.seed, **self._source.identity()}

    def _go_to(self, row: int, position: dict[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._first = None
        self._source.go_to(position)
        self._row, self._position = row, position

    def _next(self) -> _Collated:
        if isinstance(self._source, Documents):
            first = self._world.rank * self._settings.batch
            rows = [self._source.next_row() for _ in range(self._geometry.rows_of_micro_batch)]
            return self._collated(rows[first : first + self._settings.batch])
        if self._ahead is None:
            shares = self._shares(self._row)
            self._ahead = Ordered(shares, self._gathered, workers=self.workers, ahead=BATCHES_AHEAD, name="nsa-loader")
        return next(self._ahead)

    def _shares(self, row: int) -> Iterator[range]:
        """The numbers of this rank's rows, a micro-batch at a time."""
        size, batch = self._geometry.rows_of_micro_batch, self._settings.batch
        for first in count(row + self._world.rank * batch, size):
            yield range(first, first + batch)

    def _gathered(self, numbers: range) -> _Collated:
        assert not isinstance(self._source, Documents)
        return self._collated([self._source.row(number) for number in numbers])

    def _collated(self, rows: Sequence[Row]) -> _Collated:
        tokens = np.stack([row.tokens for row in rows]).astype(np.int64)
        position = self._source.position()
        if self.packing is Packing.STREAM:
            return _Collated(tokens, tokens[:, 1:], None, position)
        targets = tokens[:, 1:].copy()
        for row, targets_T in zip(rows, targets, strict=True):
            ends = np.cumsum(row.lengths) - 1
            targets_T[ends[:-1] if row.goes_on else ends] = IGNORED
        return _Collated(tokens, targets, tuple(length for row in rows for length in row.lengths), position)

    def _on_device(self, collated: _Collated) -> Batch:
        tokens = torch.from_numpy(collated.tokens).to(self._world.device)
        if collated.lengths is None:
            return Batch(tokens[:, :-1], tokens[:, 1:], None, collated.targets.size)
        targets = torch.from_numpy(collated.targets).to(self._world.device)
        return Batch(tokens[:, :-1], targets, collated.lengths, int((collated.targets != IGNORED).sum()))

    def _decided_packing(self) -> Packing:
        settings = self._settings
        if settings.packing is Packing.DOCUMENTS and not self._source.documents:
            raise CannotRunError(
                f"--packing documents: nothing in --data {settings.data} says where one ends; use --packing stream"
            )
        if settings.packing is not Packing.AUTO:
            return settings.packing
        takes_documents = settings.model.attention is not Attention.STOCK and not settings.compile
        return Packing.DOCUMENTS if self._source.documents and takes_documents else Packing.STREAM

    def _opened(self) -> Source:
        settings = self._settings
        data, model = settings.data, settings.model
        if self._draws_windows():
            assert isinstance(data, Data | Path)
            return Windows(data, model, settings.seed, self._geometry)
        if isinstance(data, Path) and has_ending((files := files_at(data))[0], TOKEN_ENDING):
            return Maps(files, model.vocab, self.trouble, length=model.seq_len, seed=settings.seed)
        tokenizer = self._fitting(tokenizer_named(settings.tokenizer))
        return Documents(
            shards_of(data, settings.text_field),
            tokenizer,
            self.trouble,
            length=model.seq_len,
            seed=settings.seed,
            workers=self.workers,
        )

    def _draws_windows(self) -> bool:
        """Random tokens, or one text without documents."""
        data = self._settings.data
        if data is Data.SYNTHETIC:
            return True
        if self._settings.packing is Packing.DOCUMENTS or self._settings.tokenizer != BYTES:
            return False
        if isinstance(data, Path):
            return data.is_file() and not has_ending(data, *TEXT_ENDINGS[1:], TOKEN_ENDING)
        return data is Data.TEXT

    def _fitting(self, tokenizer: Tokenizer) -> Tokenizer:
        settings = self._settings
        if tokenizer.vocab > settings.model.vocab:
            raise CannotRunError(
                f"--data {settings.data}: {tokenizer.name} need a vocabulary of {tokenizer.vocab}, "
                f"shape {settings.model.name} has {settings.model.vocab}"
            )
        return tokenizer


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
