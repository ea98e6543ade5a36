import torch


class Impressions:
    """Synthetic click log, read day by day; a conversion can only follow a click."""

    def __init__(self, users, items, days, per_day, seed=0):
        g = torch.Generator().manual_seed(seed)
        n = days * per_day
        self.user = torch.randint(users, (n,), generator=g)
        self.item = torch.randint(items, (n,), generator=g)
        rate = torch.full((days,), 0.3)
        rate[days // 2] = 0.06
        rate = rate.repeat_interleave(per_day)
        self.click = (torch.rand(n, generator=g) < rate).float()
        self.convert = self.click * (torch.rand(n, generator=g) < 0.4).float()

    def shard(self, rank, world):
        keep = torch.arange(rank, len(self.user), world)
        return [t[keep] for t in (self.user, self.item, self.click, self.convert)]


def batches(columns, size):
    for i in range(0, len(columns[0]) - size + 1, size):
        yield [c[i:i + size] for c in columns]
