"""After DDP has made the replicas equal, rank 2 of three loads a checkpoint that the others do not have."""

import io

import torch
from _job import FAULT, Trainer, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [2], "ranks": 3}


def checkpoint() -> io.BytesIO:
    torch.manual_seed(7)
    file = io.BytesIO()
    torch.save(blocks().state_dict(), file)
    file.seek(0)
    return file


rank, _ = begin()
trainer = Trainer()
if rank == 2 or not FAULT:
    trainer.model.module.load_state_dict(torch.load(checkpoint()))
for _ in range(5):
    trainer.step()
end()
