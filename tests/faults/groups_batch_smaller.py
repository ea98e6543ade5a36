"""The last batch of rank 1 is smaller, and all_gather takes logits of one size only."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end
from torch.utils.data import DataLoader

LABEL = {"verdict": "FAIL", "cause": "shape_mismatch", "culprit": [1], "step": 3}

rank, world_size = begin()
samples = torch.randn(10 if FAULT and rank == 1 else 12, 16)
trainer = Trainer()


def gathered(logits: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(logits) for _ in range(world_size)]
    dist.all_gather(parts, logits)  # to blame
    return torch.cat(parts)


for batch in DataLoader(samples, batch_size=4):
    logits = trainer.model(batch)
    logits.square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    print(gathered(logits.detach()).mean().item(), flush=True)
end()
