"""After a checkpoint rank 0 waits for the others in a barrier of its own; they have gone on to train."""

import io

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "rank0_only_collective", "culprit": [0], "step": 3, "ranks": 4}

rank, _ = begin()
trainer = Trainer()


def save() -> None:
    torch.save(trainer.model.state_dict(), io.BytesIO())
    if FAULT:
        dist.barrier()  # to blame


for step in range(1, 7):
    trainer.step()
    if step == 3 and rank == 0:
        save()
end()
