import torch
import torch.distributed as dist
from torch import nn


def yield_stress(x):
    """The expensive simulation, stood in for by a formula."""
    return torch.tanh(2 * x[:, 0] * x[:, 1]) + 0.3 * torch.sin(4 * x[:, 2])


class Learner:
    def __init__(self, rank, seed=0):
        torch.manual_seed(seed)
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(3))
        self.opt = torch.optim.Adam(self.members.parameters(), lr=1e-2)
        g = torch.Generator().manual_seed(50 + rank)
        spread = 0.6 + 0.9 * rank
        self.pool = (torch.rand(240, 3, generator=g) * 2 - 1) * spread
        self.labelled = torch.zeros(240, dtype=torch.bool)
        self.labelled[:16] = True

    def state_dict(self):
        return {"members": self.members.state_dict(), "opt": self.opt.state_dict(),
                "labelled": self.labelled.clone()}

    def load_state_dict(self, blob):
        self.members.load_state_dict(blob["members"])
        self.opt.load_state_dict(blob["opt"])
        self.labelled.copy_(blob["labelled"])

    def fit(self, steps):
        x = self.pool[self.labelled]
        y = yield_stress(x)
        for _ in range(steps):
            loss = sum(nn.functional.mse_loss(m(x).squeeze(1), y) for m in self.members)
            self.opt.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in self.members.parameters()])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, g in zip(self.members.parameters(), flat.split([p.numel() for p in self.members.parameters()])):
                p.grad.copy_(g.view_as(p))
            self.opt.step()
        return loss.item()

    @torch.no_grad()
    def uncertainty(self):
        preds = torch.stack([m(self.pool).squeeze(1) for m in self.members])
        return preds.std(dim=0).masked_fill(self.labelled, 0.0)

    def query(self, threshold, limit):
        """Label the points on which the ensemble disagrees; returns (mine, everybody's)."""
        score = self.uncertainty()
        ids = score.topk(limit).indices
        ids = ids[score[ids] > threshold]
        self.labelled[ids] = True
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([len(ids)]))
        return len(ids), int(torch.cat(counts).sum())
