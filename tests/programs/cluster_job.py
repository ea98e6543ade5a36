"""A training on several nodes with one planted fault: its first argument says which, and none trains and ends well.

The fault "endless" goes on until there is a file `stop` in the working directory."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

fault, rank = sys.argv[1] if len(sys.argv) > 1 else "", int(os.environ["RANK"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if fault == "deadlock" and step == 2 and rank == 3:
        dist.broadcast(torch.ones(1), 0)
    if fault == "killed" and step == 2 and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
print("trained", flush=True)
while fault == "endless":
    time.sleep(0.2)
    stop = torch.tensor([float(os.path.exists("stop"))])
    dist.all_reduce(stop)
    if stop.item():
        break
dist.destroy_process_group()
