"""The world size comes from a configuration for another cluster, with one rank more than were started."""

import os

import torch
import torch.distributed as dist
from _job import FAULT

LABEL = {
    "verdict": "HANG",
    "kind": "deadlock",
    "cause": "rendezvous_missing_rank",
    "culprit": [2],
    "limits": {"start_s": 45},
}

config = {"backend": "gloo", "world_size": 3 if FAULT else 2}
dist.init_process_group(config["backend"], rank=int(os.environ["RANK"]), world_size=config["world_size"])  # to blame
total = torch.ones(1)
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
