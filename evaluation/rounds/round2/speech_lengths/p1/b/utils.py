import argparse
import logging
import os
import random

import numpy as np
import torch
import torch.distributed as dist


class AttributeDict(dict):
    def __getattr__(self, key):
        if key in self:
            return self[key]
        raise AttributeError(key)

    def __setattr__(self, key, value):
        self[key] = value


class MetricsTracker(dict):
    def __add__(self, other):
        out = MetricsTracker(self)
        for k, v in other.items():
            out[k] = out.get(k, 0.0) + v
        return out

    def reduce(self):
        keys = sorted(self)
        s = torch.tensor([float(self[k]) for k in keys], dtype=torch.float64)
        dist.all_reduce(s)
        for k, v in zip(keys, s.tolist()):
            self[k] = v

    def __str__(self):
        frames = max(self.get("frames", 1), 1)
        return ", ".join(f"{k}={v / frames:.4f}" for k, v in self.items() if k != "frames") + f", over {frames:.0f} frames"


def fix_random_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def setup_dist():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def setup_logger(rank, world_size):
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s ({rank}/{world_size}) %(levelname)s [%(filename)s:%(lineno)d] %(message)s",
    )


def str2bool(v):
    if v.lower() in ("yes", "true", "1"):
        return True
    if v.lower() in ("no", "false", "0"):
        return False
    raise argparse.ArgumentTypeError("boolean value expected")


def save_checkpoint(path, model, optimizer, params):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    module = getattr(model, "module", model)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "params": dict(params)}, path)
