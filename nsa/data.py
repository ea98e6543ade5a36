"""Batches of tokens: each depends on seed, step, micro-batch and rank alone, so a resumed run sees the same ones."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from .config import NSAConfig
from .settings import Data
from .world import CannotRunError

# Weights and data draw from different streams of one seed.
_DATA_STREAM = 1_000_003


class Batches:
    """Inputs and targets [B, T]; the target of a token is the token after it."""

    def __init__(self, source: Data | Path, model: NSAConfig, batch: int, seed: int, device: torch.device) -> None:
        self._text = None if source is Data.SYNTHETIC else _bytes_of(source, model)
        self._vocab, self._length, self._batch = model.vocab, model.seq_len, batch
        self._seed, self._device = seed, device

    def fetch(self, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._stream(step, micro, rank))
        if self._text is None:
            tokens = torch.randint(self._vocab, (self._batch, self._length + 1), generator=generator)
        else:
            starts = torch.randint(len(self._text) - self._length, (self._batch, 1), generator=generator)
            tokens = self._text[starts + torch.arange(self._length + 1)].long()
        tokens = tokens.to(self._device)
        return tokens[:, :-1], tokens[:, 1:]

    def _stream(self, step: int, micro: int, rank: int) -> int:
        number = self._seed
        for part in (step, micro, rank):
            number = (number * _DATA_STREAM + part + 1) % (1 << 63)
        return number


def _bytes_of(source: Data | Path, model: NSAConfig) -> Tensor:
    content = source.read_bytes() if isinstance(source, Path) else shipped_text()
    if len(content) <= model.seq_len:
        length = f"sequences of {model.seq_len} tokens"
        raise CannotRunError(f"--data {source}: {len(content)} bytes are too few for {length}")
    if model.vocab < 256:
        raise CannotRunError(f"--data {source}: bytes need a vocabulary of 256, shape {model.name} has {model.vocab}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def shipped_text() -> bytes:
    """The text that comes with the package."""
    return resources.files(__package__).joinpath("texts", "village.txt").read_bytes()
