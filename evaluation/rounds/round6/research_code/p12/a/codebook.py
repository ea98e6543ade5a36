import torch
import torch.distributed as dist


class Codebook:
    """k-means over the frames of all ranks; rarely used codes are moved to data points."""

    def __init__(self, x, cfg):
        self.cfg = cfg
        self.x = x
        self.gen = torch.Generator().manual_seed(cfg["seed"] + dist.get_rank())
        self.centres = self.random_points(cfg["codes"])
        dist.broadcast(self.centres, src=0)
        self.restarts = 0

    def random_points(self, n):
        return self.x[torch.randint(len(self.x), (n,), generator=self.gen)].clone()

    def assign(self, x):
        return torch.cdist(x, self.centres).argmin(1)

    def iterate(self):
        code = self.assign(self.x)
        k, d = self.centres.shape
        sums = torch.zeros(k, d).index_add(0, code, self.x)
        count = torch.bincount(code, minlength=k).float()
        error = (self.x - self.centres[code]).pow(2).sum().reshape(1)
        for t in (sums, count, error):
            dist.all_reduce(t)
        used = count > self.cfg["min_count"]
        self.centres[used] = sums[used] / count[used, None]
        self.revive(~used)
        return (error / count.sum()).item()

    def revive(self, dead):
        n = int(dead.sum())
        if n == 0:
            return
        points = self.random_points(n)
        dist.broadcast(points, src=0)
        self.centres[dead] = points
        self.restarts += n
