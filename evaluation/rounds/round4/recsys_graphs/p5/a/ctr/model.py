import torch
from torch import nn
from torch.nn import functional as F

from .data import FIELDS, NUMERIC


class SharedBottom(nn.Module):
    """Embeddings and trunk are shared, one small head for each task."""

    def __init__(self, dim=8, hidden=48):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(n, dim) for n in FIELDS.values()])
        self.trunk = nn.Sequential(
            nn.Linear(dim * len(FIELDS) + NUMERIC, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
        )
        self.heads = nn.ModuleDict({
            task: nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))
            for task in ("click", "conversion")
        })

    def forward(self, cat, num):
        emb = [table(cat[:, k]) for k, table in enumerate(self.embeddings)]
        h = self.trunk(torch.cat(emb + [num], dim=1))
        return {task: head(h).squeeze(1) for task, head in self.heads.items()}


def multi_task_loss(out, click, conv, conv_weight):
    """Click loss on every impression, conversion loss on the clicked ones."""
    loss = F.binary_cross_entropy_with_logits(out["click"], click)
    clicked = click > 0
    if clicked.any():
        conv_loss = F.binary_cross_entropy_with_logits(out["conversion"][clicked], conv[clicked])
        loss = loss + conv_weight * conv_loss
    return loss
