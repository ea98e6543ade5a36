"""Rows that depend on their number alone: random tokens, and random windows of one text."""

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
from .named import shipped_text
from .packing import Row

# Weights and data draw from different streams of one seed.
_DATA_STREAM = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How many rows a step takes, and how they are numbered: by micro-batch, rank and place in the batch."""

    world_size: int
    accumulate: int
    batch: int

    @property
    def rows_of_micro_batch(self) -> int:
        return self.world_size * self.batch

    @property
    def rows_of_step(self) -> int:
        return self.accumulate * self.rows_of_micro_batch


class Windows:
    """Every rank, step and micro-batch draws a batch by a number made of the three.

    At another world size the rows stay those of the run that began: its geometry is part of the position.
    """

    documents = False

    def __init__(self, source: Data | Path, model: NSAConfig, seed: int, geometry: Geometry) -> None:
        self._text = None if source is Data.SYNTHETIC else _bytes_of(source, model)
        self._vocab, self._length, self._seed = model.vocab, model.seq_len, seed
        self._home = geometry
        self._newest: tuple[tuple[int, int, int], Tensor] | None = None

    def identity(self) -> dict[str, Any]:
        return {"tokens": self._vocab if self._text is None else len(self._text)}

    def position(self) -> dict[str, Any]:
        return asdict(self._home)

    def go_to(self, position: dict[str, Any]) -> None:
        self._home = Geometry(**position)
        self._newest = None

    def row(self, number: int) -> Row:
        step, rest = divmod(number, self._home.rows_of_step)
        micro, rest = divmod(rest, self._home.rows_of_micro_batch)
        rank, place = divmod(rest, self._home.batch)
        tokens = self._drawn(step + 1, micro, rank)[place].numpy()
        return Row(tokens=tokens, lengths=(self._length,), goes_on=True)

    def _drawn(self, step: int, micro: int, rank: int) -> Tensor:
        """The batch that they have, [B, T + 1]."""
        newest = self._newest
        if newest is not None and newest[0] == (step, micro, rank):
            return newest[1]
        generator = torch.Generator().manual_seed(self._stream(step, micro, rank))
        if self._text is None:
            tokens = torch.randint(self._vocab, (self._home.batch, self._length + 1), generator=generator)
        else:
            starts = torch.randint(len(self._text) - self._length, (self._home.batch, 1), generator=generator)
            tokens = self._text[starts + torch.arange(self._length + 1)]
        self._newest = (step, micro, rank), tokens
        return tokens

    def _stream(self, step: int, micro: int, rank: int) -> int:
        number = self._seed
        for part in (step, micro, rank):
            number = (number * _DATA_STREAM + part + 1) % (1 << 63)
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
