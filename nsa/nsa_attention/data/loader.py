"""The data loader of one rank. All ranks take their rows from one common order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Attention
from ..observe import say
from ..settings import Settings
from ..values import Data, Packing
from ..world import MAX_COMPARED, CannotRunError, World
from .maps import TokenWindows
from .packing import Row
from .prefetch import OrderedPrefetch
from .problems import DataProblems
from .shards import TEXT_ENDINGS, TOKEN_ENDING, files_at, has_ending
from .source_shards import shards_for
from .streams import DocumentStream
from .tokens import BYTES, Tokenizer, tokenizer_named
from .windows import Geometry, RandomWindows

IGNORED = -100  # the default ignore_index of PyTorch's cross entropy
VERSION = 1
BATCHES_AHEAD = 4
WORKERS = 2

Source = RandomWindows | TokenWindows | DocumentStream


class Batch(NamedTuple):
    """A batch on the device: input tokens and target tokens, both of shape [B, T].

    The target of a token is the next token of the same document. With packing `documents`, the target after the last
    token of a document is IGNORED. If a row could not be read, all its targets are IGNORED.
    """

    tokens: Tensor
    targets: Tensor
    lengths: tuple[int, ...] | None  # document lengths of all rows in order; None if each row is one sequence
    counted: int  # number of targets that are not IGNORED, counted on the CPU to avoid a device synchronization


class _HostBatch(NamedTuple):
    """A batch in CPU memory, as NumPy arrays."""

    tokens: NDArray[np.int64]  # [B, T + 1]
    targets: NDArray[np.int64]
    lengths: tuple[int, ...] | None
    position: dict[str, Any]  # position of the data source after this batch


class Batches:
    """The data loader of one rank. The constructor raises CannotRunError if the data cannot be used.

    All ranks share one order of rows. Each micro-batch takes the next rows of this order: first those of rank 0, then
    those of rank 1, and so on. Call `close` at the end, because the loader may have started threads.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self._geometry = Geometry(world_size=world.size, accumulate=settings.accumulate, batch=settings.batch)
        self.problems = DataProblems(settings.bad_shards)
        self._source = self._open_source()
        self.packing = self._choose_packing()
        self._row = 0
        self._position = self._source.position()  # after the last fetched batch, without prefetched batches
        self._identity_at_start = self._source.identity()
        self._prefetch: OrderedPrefetch[range, _HostBatch] | None = None
        self._first: _HostBatch | None = None
        self.ready_s: float | None = None  # wait for the first batch; None before `wait_for_first` is called
        self.last_fetch_s = 0.0
        self.fetch_s = 0.0  # total over all batches
        self.fetches = 0
        self._says_missed = False

    @property
    def workers(self) -> int:
        """Return the number of prefetching threads. The default is 0 if all data is in memory."""
        if self._settings.workers is not None:
            return self._settings.workers
        return 0 if self._draws_windows() else WORKERS

    def wait_for_first(self) -> float:
        """Load the batch that the first `fetch` will return, and return the loading time in seconds."""
        started_s = time.perf_counter()
        if self._first is None:
            self._first = self._next()
        self.ready_s = time.perf_counter() - started_s
        return self.ready_s

    def fetch(self) -> Batch:
        """Return the next batch, on the device."""
        started_s = time.perf_counter()
        host_batch, self._first = self._first or self._next(), None
        self._row += self._geometry.rows_of_micro_batch
        self._position = host_batch.position
        batch = self._on_device(host_batch)
        self.last_fetch_s = time.perf_counter() - started_s
        self.fetch_s += self.last_fetch_s
        self.fetches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last fetched batch, as JSON values.

        The position is the same on every rank and does not depend on the number of ranks.
        """
        return {"version": VERSION, **self._identity(), "row": self._row, "position": dict(self._position)}

    def position_digest(self) -> int:
        """Return a hash of the position in the data and of the list of files, which must be equal on all ranks.

        The hashes differ if a rank has skipped data that another rank could read. They are equal by chance in one of
        MAX_COMPARED steps. The number of rows is part of the hash, so that such a collision lasts only one step.
        """
        state = repr((self._row, sorted(self._position.items()), self._identity_at_start))
        return hashlib.sha256(state.encode()).digest()[0] % MAX_COMPARED

    def position_text(self) -> str:
        """Return the position in the data as human-readable text."""
        position = {**self._position, "row": self._row}
        if isinstance(self._source, TokenWindows):
            position["files"] = len(self._identity_at_start["files"])
        return ", ".join(f"{name} {value}" for name, value in position.items())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position in the data that `state_dict` returned.

        Raises CannotRunError if the position belongs to different data or has another format version.
        """
        if state.get("version") != VERSION:
            raise CannotRunError(
                f"--resume: the data position has format version {state.get('version')}, not {VERSION}"
            )
        mistakes = [
            f"--resume: the data position belongs to {key} {_short(state.get(key))}, this run has {_short(value)}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if mistakes:
            raise CannotRunError("\n".join(mistakes))
        self._go_to(int(state["row"]), dict(state["position"]))

    def description(self) -> str:
        """Return a short description of the data, such as "documents, packing stream, 2 workers"."""
        kind = {RandomWindows: "random windows", TokenWindows: "token files", DocumentStream: "documents"}[
            type(self._source)
        ]
        return f"{kind}, packing {self.packing}, {self.workers} workers"

    def summary(self) -> dict[str, Any]:
        """Return the content of loader_rank<r>.json: settings, counts, times in seconds, and skipped data."""
        return {
            "data": str(self._settings.data),
            "rank": self._world.rank,
            "packing": str(self.packing),
            "workers": self.workers,
            "ready_s": self.ready_s,
            "rows": self._row,
            "batches": self.fetches,
            "fetch_s": self.fetch_s,
            **self.problems.summary(),
        }

    def close(self) -> None:
        """Stop the loader's threads and close its data files."""
        if self._prefetch is not None:
            self._prefetch.close()
            self._prefetch = None
        if not isinstance(self._source, RandomWindows):
            self._source.close()

    def _identity(self) -> dict[str, Any]:
        kind = {RandomWindows: "windows", TokenWindows: "tokens", DocumentStream: "documents"}[type(self._source)]
        return {"data": kind, "seed": self._settings.seed, **self._source.identity()}

    def _go_to(self, row: int, position: dict[str, Any]) -> None:
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = self._first = None
        self._source.go_to(position)
        self._row, self._position = row, position

    def _next(self) -> _HostBatch:
        if isinstance(self._source, DocumentStream):
            first = self._world.rank * self._settings.batch
            rows = [self._source.next_row() for _ in range(self._geometry.rows_of_micro_batch)]
            if self._source.missed is not None and not self._says_missed:
                self._says_missed = True
                say(f"[DATA] rank={self._world.rank} reads blocks of another rank itself: {self._source.missed}")
            return self._collate(rows[first : first + self._settings.batch])
        if self._prefetch is None:
            row_ranges = self._micro_batches(self._row)
            self._prefetch = OrderedPrefetch(
                row_ranges, self._load_rows, workers=self.workers, ahead=BATCHES_AHEAD, name="nsa-loader"
            )
        return next(self._prefetch)

    def _micro_batches(self, row: int) -> Iterator[range]:
        """Yield the row numbers of this rank for each micro-batch, indefinitely, starting at row `row`."""
        size, batch = self._geometry.rows_of_micro_batch, self._settings.batch
        for first in count(row + self._world.rank * batch, size):
            yield range(first, first + batch)

    def _load_rows(self, numbers: range) -> _HostBatch:
        assert not isinstance(self._source, DocumentStream)
        return self._collate([self._source.row(number) for number in numbers])

    def _collate(self, rows: Sequence[Row]) -> _HostBatch:
        tokens = np.stack([row.tokens for row in rows]).astype(np.int64)
        position = self._source.position()
        targets = tokens[:, 1:].copy()
        for row, targets_T in zip(rows, targets, strict=True):
            if not row.counts:
                targets_T[:] = IGNORED
            elif self.packing is Packing.DOCUMENTS:
                ends = np.cumsum(row.lengths) - 1
                targets_T[ends[:-1] if row.goes_on else ends] = IGNORED
        if self.packing is Packing.STREAM:
            return _HostBatch(tokens, targets, None, position)
        return _HostBatch(tokens, targets, tuple(length for row in rows for length in row.lengths), position)

    def _on_device(self, host_batch: _HostBatch) -> Batch:
        tokens = torch.from_numpy(host_batch.tokens).to(self._world.device)
        targets = torch.from_numpy(host_batch.targets).to(self._world.device)
        return Batch(tokens[:, :-1], targets, host_batch.lengths, int((host_batch.targets != IGNORED).sum()))

    def _choose_packing(self) -> Packing:
        settings = self._settings
        if settings.packing is Packing.DOCUMENTS and not self._source.documents:
            raise CannotRunError(
                f"--packing documents: nothing in --data {settings.data} marks where a document ends; "
                "use --packing stream"
            )
        if settings.packing is not Packing.AUTO:
            return settings.packing
        takes_documents = settings.model.attention is not Attention.STOCK and not settings.compile
        return Packing.DOCUMENTS if self._source.documents and takes_documents else Packing.STREAM

    def _open_source(self) -> Source:
        settings = self._settings
        data, model = settings.data, settings.model
        if self._draws_windows():
            assert isinstance(data, Data | Path)
            return RandomWindows(data, model, settings.seed, self._geometry)
        if isinstance(data, Path) and has_ending((files := files_at(data))[0], TOKEN_ENDING):
            return TokenWindows(files, model.vocab, self.problems, length=model.seq_len, seed=settings.seed)
        tokenizer = self._check_vocabulary(tokenizer_named(settings.tokenizer))
        return DocumentStream(
            shards_for(data, settings.text_field),
            tokenizer,
            self.problems,
            length=model.seq_len,
            seed=settings.seed,
            workers=self.workers,
            local_rank=self._world.local_rank,
            local_size=self._world.local_size,
        )

    def _draws_windows(self) -> bool:
        """Return whether the data is random tokens or a single text without document boundaries."""
        data = self._settings.data
        if data is Data.SYNTHETIC:
            return True
        if self._settings.packing is Packing.DOCUMENTS or self._settings.tokenizer != BYTES:
            return False
        if isinstance(data, Path):
            return data.is_file() and not has_ending(data, *TEXT_ENDINGS[1:], TOKEN_ENDING)
        return data is Data.TEXT

    def _check_vocabulary(self, tokenizer: Tokenizer) -> Tokenizer:
        settings = self._settings
        if tokenizer.vocab > settings.model.vocab:
            raise CannotRunError(
                f"--data {settings.data}: {tokenizer.name} needs a vocabulary of {tokenizer.vocab}, "
                f"shape {settings.model.name} has {settings.model.vocab}"
            )
        return tokenizer


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
