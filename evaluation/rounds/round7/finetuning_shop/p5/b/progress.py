"""Where an interrupted job stands. The workdir is local to the node of the first rank."""
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)

FRESH = {"step": 0, "samples": 0, "best": 1e9}


def _paths(workdir):
    return os.path.join(workdir, "progress.json"), os.path.join(workdir, "weights.pt")


def save(workdir, net, progress):
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(workdir, exist_ok=True)
        meta, weights = _paths(workdir)
        torch.save(full, weights)
        with open(meta, "w") as f:
            json.dump(progress, f)
    dist.barrier()


def restore_weights(workdir, net):
    _, weights = _paths(workdir)
    full = torch.load(weights) if dist.get_rank() == 0 else {}
    set_model_state_dict(net, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def restore_progress(workdir):
    meta, _ = _paths(workdir)
    progress = dict(FRESH)
    if dist.get_rank() == 0 and os.path.exists(meta):
        with open(meta) as f:
            progress.update(json.load(f))
    return progress
