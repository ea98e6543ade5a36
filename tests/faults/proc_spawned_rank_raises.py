"""The program starts its ranks itself, with mp.spawn and a port of its own. One of them gets a batch it cannot use."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _job import FAULT, STEPS, Trainer, batch, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [0], "ranks": 1}


def work(rank: int, port: int, is_faulty: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    trainer = Trainer()
    for step in range(STEPS):
        if is_faulty and rank == 1 and step == 3:
            raise ValueError(f"batch {step} has {len(batch())} rows")
        trainer.step()
    end()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    mp.spawn(work, args=(free_port, FAULT), nprocs=2)
