"""In one step rank 0 hands one metric more than the others to the helper that averages them."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "shape_mismatch", "culprit": [0], "step": 3}


def reduce_metrics(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def main() -> None:
    rank, _ = begin()
    trainer = Trainer()
    for step in range(1, STEPS + 1):
        loss = trainer.step()
        norm = float(sum(one.square().sum() for one in trainer.model.parameters()))
        metrics = torch.tensor([loss, norm])
        if FAULT and rank == 0 and step == 3:
            metrics = torch.cat([metrics, torch.tensor([loss / norm])])  # to blame
        print(step, reduce_metrics(metrics).tolist(), flush=True)
    end()


main()
