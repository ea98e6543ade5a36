"""Rank 0 writes a checkpoint to slow storage while the others wait in a barrier."""

import os
import subprocess
import sys
import tempfile

import torch.distributed as dist
from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}
READER = "import sys, time; pipe = open(sys.argv[1], 'rb')\nwhile pipe.read(40_000): time.sleep(0.25)"


def save(size: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "slow")
        os.mkfifo(path)
        reader = subprocess.Popen([sys.executable, "-c", READER, path])
        with open(path, "wb", buffering=0) as pipe:
            for _ in range(size // 4096):
                pipe.write(b"\0" * 4096)
        reader.wait()


rank, _ = begin()
trainer = Trainer()
for step in range(4):
    trainer.step()
    if step == 2:
        if rank == 0:
            save(1_200_000)
        dist.barrier()
end()
