"""Loss on held-out data, evaluated on the same batches each time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .data import Batch, Batches
from .observe import say, without_ending_training
from .settings import Settings
from .world import World

# For synthetic data, the held-out batches are generated with another seed.
_SEED_OFFSET = 1 << 31
HEADER = "step,loss,tokens,seconds"


class Evaluation:
    """The periodic evaluation of a model on held-out data.

    `loss_of` returns the loss of a batch, summed over the targets that count. `model` may be wrapped, for example by
    DDP.
    """

    def __init__(self, settings: Settings, world: World, model: nn.Module, loss_of: Callable[[Batch], Tensor]) -> None:
        held_out = settings.data if settings.eval_data is None else settings.eval_data
        seed = settings.seed + _SEED_OFFSET
        self._batches = Batches(replace(settings, data=held_out, seed=seed, accumulate=1), world)
        self._start = self._batches.state_dict()
        self._count = settings.eval_batches
        self._world, self._model, self._loss_of = world, model, loss_of
        self._table = settings.out_dir / "evaluation.csv"

    def evaluate(self, step: int) -> None:
        """Evaluate the model, print the loss, and append it to evaluation.csv.

        Every rank must call this method, because sharded models gather their weights. Only rank 0 prints and writes.
        """
        started_s = time.perf_counter()
        loss, targets = (self._world.average_over_ranks(total) for total in self._totals())
        mean, tokens = float(loss / targets), round(float(targets) * self._world.size)
        seconds = time.perf_counter() - started_s
        if not self._world.is_first:
            return
        say(f"evaluation step {step} loss {mean:.4f} {tokens} tokens {seconds:.3f} s")
        with without_ending_training(), self._table.open("a", encoding="utf-8") as table:
            if table.tell() == 0:
                table.write(f"{HEADER}\n")
            table.write(f"{step},{mean:.6g},{tokens},{seconds:.6g}\n")

    @torch.no_grad()
    def _totals(self) -> tuple[Tensor, Tensor]:
        """Return the summed loss of all batches of this rank, and the number of targets in them."""
        was_training = self._model.training
        self._model.eval()
        try:
            self._batches.load_state_dict(self._start)
            batches = [self._batches.fetch() for _ in range(self._count)]
            loss_sum = torch.stack([self._loss_of(batch) for batch in batches]).double().sum()
            return loss_sum, loss_sum.new_tensor(sum(batch.counted for batch in batches))
        finally:
            self._model.train(was_training)
            self._batches.close()
