"""Node-local checkpoints: every rank keeps the parameters and the optimizer
moments that it owns under its own scratch directory."""
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

_NAME = re.compile(r"step_(\d+)\.pt$")


def size_of(obj):
    if torch.is_tensor(obj):
        return obj.numel() * obj.element_size()
    if isinstance(obj, dict):
        return sum(size_of(v) for v in obj.values())
    if isinstance(obj, (list, tuple)):
        return sum(size_of(v) for v in obj)
    return 8


class ShardStore:
    def __init__(self, root, keep, mb_per_s, logger):
        self.dir = Path(root) / f"node{dist.get_rank()}"
        self.dir.mkdir(parents=True, exist_ok=True)
        self.keep = keep
        self.mb_per_s = mb_per_s
        self.log = logger

    def wipe(self):
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)

    def steps(self):
        found = (_NAME.match(p.name) for p in self.dir.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def save(self, step, state, deadline=None):
        """Write one shard; with a deadline, only if the disk can take it in time."""
        need = size_of(state) / 2**20 / self.mb_per_s
        if deadline is not None and need > deadline:
            self.log.info("step %d: shard needs %.1fs, %.1fs left, keeping the last one", step, need, deadline)
            return False
        tmp = self.dir / f".step_{step}.tmp"
        torch.save(state, tmp)
        os.replace(tmp, self.dir / f"step_{step}.pt")
        for old in self.steps()[:-self.keep]:
            (self.dir / f"step_{old}.pt").unlink()
        return True

    def newest(self):
        have = self.steps()
        mine = torch.tensor(have[-1] if have else 0)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        return int(mine)

    def load(self, step):
        return torch.load(self.dir / f"step_{step}.pt", weights_only=True)
