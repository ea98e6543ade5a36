import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherFeatures(torch.autograd.Function):
    """all_gather that sends the gradient back to the rank that produced the row."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


class TinyCLIP(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(32 * 16, dim))
        self.embed = nn.Embedding(vocab, 64, padding_idx=0)
        self.text = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, dim))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, ids):
        weight = (ids > 0).float().unsqueeze(-1)
        pooled = (self.embed(ids) * weight).sum(1) / weight.sum(1).clamp(min=1)
        v = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.text(pooled), dim=-1)
        return v, t, self.scale.exp().clamp(max=100)


def info_nce(v, t, scale):
    all_v, all_t = GatherFeatures.apply(v), GatherFeatures.apply(t)
    labels = torch.arange(len(v)) + dist.get_rank() * len(v)
    loss_v = F.cross_entropy(scale * v @ all_t.T, labels)
    loss_t = F.cross_entropy(scale * t @ all_v.T, labels)
    hits = ((v @ all_t.T).argmax(-1) == labels).sum()
    return (loss_v + loss_t) / 2, hits
