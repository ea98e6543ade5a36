"""Training rows that depend only on their number: random tokens, or random windows of a text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import NSAConfig
from ..values import Data
from ..world import CannotRunError
from .packing import Row
from .source_shards import shipped_text

# Multiplier that derives the seeds of the data from `--seed`, so that weights and data use different random numbers.
_SEED_FACTOR = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The numbers of ranks, of micro-batches per step and of rows per batch in a training run.

    Rows are numbered by step, micro-batch, rank and index in the batch, in this order.
    """

    world_size: int
    accumulate: int
    batch: int

    @property
    def rows_of_micro_batch(self) -> int:
        return self.world_size * self.batch

    @property
    def rows_of_step(self) -> int:
        return self.accumulate * self.rows_of_micro_batch


class RandomWindows:
    """A data source of random tokens or random windows of a text.

    Each batch has its own seed, computed from `seed`, step, micro-batch and rank. The position contains the geometry of
    the original run, so a resumed run with a different number of ranks reads the same rows.
    """

    documents = False

    def __init__(self, source: Data | Path, model: NSAConfig, seed: int, geometry: Geometry) -> None:
        self._text = None if source is Data.SYNTHETIC else _bytes_of(source, model)
        self._vocab, self._length, self._seed = model.vocab, model.seq_len, seed
        self._geometry = geometry
        self._last_batch: tuple[tuple[int, int, int], Tensor] | None = None

    def identity(self) -> dict[str, Any]:
        return {"tokens": self._vocab if self._text is None else len(self._text)}

    def position(self) -> dict[str, Any]:
        return asdict(self._geometry)

    def go_to(self, position: dict[str, Any]) -> None:
        self._geometry = Geometry(**position)
        self._last_batch = None

    def row(self, number: int) -> Row:
        step, rest = divmod(number, self._geometry.rows_of_step)
        micro, rest = divmod(rest, self._geometry.rows_of_micro_batch)
        rank, place = divmod(rest, self._geometry.batch)
        tokens = self._draw_batch(step + 1, micro, rank)[place].numpy()
        return Row(tokens=tokens, lengths=(self._length,), goes_on=True)

    def _draw_batch(self, step: int, micro: int, rank: int) -> Tensor:
        """Return the token ids of `rank` for one micro-batch of `step`, shape [B, T + 1]."""
        last = self._last_batch
        if last is not None and last[0] == (step, micro, rank):
            return last[1]
        generator = torch.Generator().manual_seed(self._seed_for(step, micro, rank))
        if self._text is None:
            tokens = torch.randint(self._vocab, (self._geometry.batch, self._length + 1), generator=generator)
        else:
            starts = torch.randint(len(self._text) - self._length, (self._geometry.batch, 1), generator=generator)
            tokens = self._text[starts + torch.arange(self._length + 1)]
        self._last_batch = (step, micro, rank), tokens
        return tokens

    def _seed_for(self, step: int, micro: int, rank: int) -> int:
        number = self._seed
        for part in (step, micro, rank):
            number = (number * _SEED_FACTOR + part + 1) % (1 << 63)
        return number


def _bytes_of(source: Data | Path, model: NSAConfig) -> Tensor:
    try:
        content = source.read_bytes() if isinstance(source, Path) else shipped_text()
    except OSError as error:
        raise CannotRunError(f"--data {source}: cannot be read ({error.strerror})") from error
    if len(content) <= model.seq_len:
        length = f"sequences of {model.seq_len} tokens"
        raise CannotRunError(f"--data {source}: {len(content)} bytes are too few for {length}")
    if model.vocab < 256:
        raise CannotRunError(f"--data {source}: bytes need a vocabulary of 256, shape {model.name} has {model.vocab}")
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
