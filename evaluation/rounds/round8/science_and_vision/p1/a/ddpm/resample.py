import torch
import torch.distributed as dist


class LossAwareSampler:
    """Draw timesteps in proportion to the running loss seen on all ranks."""

    def __init__(self, timesteps, world, decay=0.9, floor=0.1):
        self.world, self.decay, self.floor = world, decay, floor
        self.loss = torch.ones(timesteps)

    def sample(self, n):
        p = self.loss / self.loss.sum()
        p = (1 - self.floor) * p + self.floor / len(p)
        t = torch.multinomial(p, n, replacement=True)
        return t, 1.0 / (len(p) * p[t])

    def update(self, t, losses):
        mine = torch.stack([t.float(), losses])
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        for part in everyone:
            for ti, li in zip(part[0].long().tolist(), part[1].tolist()):
                self.loss[ti] = self.decay * self.loss[ti] + (1 - self.decay) * li
