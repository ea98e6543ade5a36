import torch
import torch.distributed as dist


class Meters:
    """Named running sums between two log lines, averaged over all ranks."""

    def __init__(self, names, group):
        self.names, self.group = list(names), group
        self.reset()

    def reset(self):
        self.sums = {}

    def add(self, name, value, count=1):
        self.sums.setdefault(name, torch.zeros(2)).add_(torch.tensor([float(value), float(count)]))

    def averages(self):
        out = {}
        for name in sorted(self.sums):
            pair = self.sums[name].clone()
            dist.all_reduce(pair, group=self.group)
            if pair[1] > 0:
                out[name] = (pair[0] / pair[1]).item()
        self.reset()
        return out
