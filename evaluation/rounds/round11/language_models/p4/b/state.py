"""Saving and restoring a whole run: weights, optimizer, scheduler and loaders."""
import os

import torch
import torch.distributed as dist


def save(path, step, model, opt, sched, loader):
    loaders = [None] * dist.get_world_size()
    dist.all_gather_object(loaders, loader.state_dict())
    if dist.get_rank() == 0:
        blob = {
            "step": step,
            "model": model.module.state_dict(),
            "opt": opt.state_dict(),
            "sched": sched.state_dict(),
            "loaders": loaders,
        }
        torch.save(blob, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def restore(path, model, opt, sched, loader):
    blob = torch.load(path, weights_only=False)
    model.module.load_state_dict(blob["model"])
    opt.load_state_dict(blob["opt"])
    sched.load_state_dict(blob["sched"])
    loader.load_state_dict(blob["loaders"][0])
    return blob["step"]
