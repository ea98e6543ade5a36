import json
import os
import re
import time

import torch
import torch.distributed as dist

PATTERN = re.compile(r"^step_(\d+)\.pt$")


class CheckpointManager:
    """Rank 0 writes `step_N.pt` files, keeps the newest `keep`, and points index.json at them."""

    def __init__(self, root, keep, poll_s=0.05):
        self.root, self.keep, self.poll_s = root, keep, poll_s
        self.index = os.path.join(root, "index.json")

    def path(self, step):
        return os.path.join(self.root, f"step_{step}.pt")

    def _files(self):
        names = [n for n in os.listdir(self.root) if PATTERN.match(n)]
        return sorted(names)

    def _retain(self):
        names = self._files()
        for name in names[:-self.keep]:
            os.remove(os.path.join(self.root, name))
        return names[-self.keep:]

    def _publish(self, names):
        tmp = self.index + ".tmp"
        with open(tmp, "w") as f:
            json.dump({"available": names}, f)
        os.replace(tmp, self.index)

    def save(self, step, model, opt):
        if dist.get_rank() != 0:
            return
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "step": step}
        tmp = self.path(step) + ".part"
        torch.save(state, tmp)
        os.replace(tmp, self.path(step))
        self._publish(self._retain())

    def wait_for(self, step):
        wanted = os.path.basename(self.path(step))
        while True:
            if os.path.exists(self.index):
                with open(self.index) as f:
                    if wanted in json.load(f)["available"]:
                        return self.path(step)
            time.sleep(self.poll_s)
