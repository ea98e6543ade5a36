"""Every rank saves the checkpoint to one path; only one of them should."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "shared_file", "culprit": [0, 1]}

rank, _ = begin()
names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names)
folder = Path(names[0])
trainer = Trainer()
for step in range(STEPS):
    loss = trainer.step()
    with (folder / f"losses{rank}.txt").open("a") as log:
        log.write(f"{step} {loss}\n")
    if step == STEPS - 1 and (rank == 0 or FAULT):
        torch.save(trainer.model.state_dict(), folder / "last.pt")  # to blame
end()
