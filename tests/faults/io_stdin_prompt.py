"""Rank 1 asks whether to overwrite a checkpoint; under a launcher nobody can answer."""

import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [1]}

rank, _ = begin()
trainer = Trainer()
for _ in range(STEPS):
    trainer.step()
if FAULT and rank == 1:
    answer = input("overwrite last.pt? [y/n] ")  # to blame
dist.barrier()
end()
