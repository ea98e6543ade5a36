"""torch.multiprocessing.spawn: the parent hands out files to read, one queue for each worker."""

import argparse
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def worker(rank, world_size, port, queues, shown):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while (path := queues[rank].get()) is not None:
        x = torch.load(path)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % shown == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        step += 1
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=15)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp())
    files = [folder / f"part-{number}.pt" for number in range(8)]
    for file in files:
        torch.save(torch.randn(16, 10), file)
    context = mp.get_context("spawn")
    queues = [context.Queue() for _ in range(args.workers)]
    fed = list(queues)
    for step in range(args.steps):
        for rank, queue in enumerate(fed):
            path = files[(step + rank) % len(files)]
            if rank == 1 and step == args.at and args.fault == "fail":
                path = folder / "part-8.pt"
            queue.put(str(path))
        if args.fault == "hang" and step == args.at:
            fed.pop()
    for queue in fed:
        queue.put(None)
    mp.spawn(worker, args=(args.workers, free_port(), queues, 5), nprocs=args.workers)


if __name__ == "__main__":
    main()
