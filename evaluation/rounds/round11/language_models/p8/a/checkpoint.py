"""Export of a sharded model: full weights, shadow weights, and the list of best files."""
import json
import os

import torch
import torch.distributed as dist


class Shadow:
    """Exponential moving average of the sharded parameters, kept sharded as well."""

    def __init__(self, model, decay):
        self.decay = decay
        self.params = {k: p.detach().clone() for k, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for k, p in model.named_parameters():
            self.params[k].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)


class Exporter:
    def __init__(self, folder, keep=2):
        self.folder, self.keep = folder, keep
        self.best = []

    def qualifies(self, score):
        return len(self.best) < self.keep or score < self.best[-1][0]

    def remember(self, score, name):
        self.best = sorted(self.best + [(score, name)])
        dropped = self.best[self.keep :]
        self.best = self.best[: self.keep]
        return [name for _, name in dropped]

    def export(self, step, score, model, shadow):
        if not self.qualifies(score):
            return False
        name = f"step{step:04d}.pt"
        weights = {k: p.full_tensor() for k, p in model.named_parameters()}
        average = {k: p.full_tensor() for k, p in shadow.params.items()}
        dropped = self.remember(score, name)
        if dist.get_rank() != 0:
            return True
        blob = {"step": step, "score": score, "weights": weights, "average": average}
        torch.save(blob, os.path.join(self.folder, name))
        for old in dropped:
            path = os.path.join(self.folder, old)
            if os.path.exists(path):
                os.remove(path)
        with open(os.path.join(self.folder, "best.json"), "w") as f:
            json.dump(self.best, f)
        return True
