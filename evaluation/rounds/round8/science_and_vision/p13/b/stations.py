import torch


class StationArchive:
    """Daily states of a drifting field; a few days lack a sensor."""

    def __init__(self, days, tokens, variables, seed):
        gen = torch.Generator().manual_seed(seed)
        state = torch.randn(tokens, variables, generator=gen)
        rows = []
        for _ in range(days + 1):
            state = 0.9 * state.roll(1, 0) + 0.3 * torch.randn(tokens, variables, generator=gen)
            rows.append(state)
        self.x = torch.stack(rows)
        self.x[days // 2 + 5, 3, 2] = float("nan")
        self.days, self.seed = days, seed

    def batches(self, epoch, size, rank, world):
        gen = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.days, generator=gen)
        for idx in order[rank::world].split(size):
            if len(idx) == size:
                yield self.x[idx], self.x[idx + 1]
