"""The loss on what is held out: the same batches each time, without gradients, and its table."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .data import Batches
from .observe import say
from .settings import Settings
from .world import World

# No step of the training has this number: of synthetic data these are other batches.
_STEP = 0
HEADER = "step,loss,tokens,seconds"


class Evaluation:
    """`loss_of` computes the mean loss of a batch of tokens and targets."""

    def __init__(
        self, settings: Settings, world: World, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        source = settings.data if settings.eval_data is None else settings.eval_data
        self._batches = Batches(source, settings.model, settings.batch, settings.seed, world.device)
        self._count = settings.eval_batches
        self._tokens = world.size * settings.eval_batches * settings.batch * settings.model.seq_len
        self._world, self._model, self._loss_of = world, model, loss_of
        self._table = settings.out_dir / "evaluation.csv"

    def after(self, step: int) -> None:
        """Evaluate, say it, add its row. Every rank must call it: sharded models gather their weights."""
        started_s = time.perf_counter()
        loss = float(self._world.average_over_ranks(self._mean_loss()))
        seconds = time.perf_counter() - started_s
        if not self._world.is_first:
            return
        say(f"evaluation step {step} loss {loss:.4f} {self._tokens} tokens {seconds:.3f} s")
        with self._table.open("a", encoding="utf-8") as table:
            if table.tell() == 0:
                table.write(f"{HEADER}\n")
            table.write(f"{step},{loss:.6g},{self._tokens},{seconds:.6g}\n")

    @torch.no_grad()
    def _mean_loss(self) -> Tensor:
        trained = self._model.training
        self._model.eval()
        try:
            batches = (self._batches.fetch(_STEP, number, self._world.rank) for number in range(self._count))
            return torch.stack([self._loss_of(tokens, targets) for tokens, targets in batches]).mean()
        finally:
            self._model.train(trained)
