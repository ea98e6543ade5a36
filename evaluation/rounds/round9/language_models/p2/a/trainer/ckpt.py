"""Full (unsharded) checkpoints of an HSDP model, written and read by rank 0."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)


def save(path, model, tracker, step, control):
    dist.barrier(group=control)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        tmp = path + ".tmp"
        torch.save({"model": full, "tracker": tracker.state_dict(), "step": step}, tmp)
        os.replace(tmp, path)
    dist.barrier(group=control)


def restore(path, model, tracker):
    full, extra = {}, [None]
    if dist.get_rank() == 0:
        blob = torch.load(path, weights_only=True)
        full = blob["model"]
        extra = [{"step": blob["step"], "tracker": blob["tracker"]}]
    dist.broadcast_object_list(extra, src=0)
    tracker.load_state_dict(extra[0]["tracker"])
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    return extra[0]["step"]
