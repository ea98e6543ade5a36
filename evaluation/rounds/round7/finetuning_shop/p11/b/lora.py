import math

import torch
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale


def inject(model, rank=4, alpha=8, targets=("q", "v", "fc")):
    for p in model.parameters():
        p.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, alpha))
    return model


def adapter_state(model):
    return {k: v for k, v in model.state_dict().items() if k.endswith((".down", ".up"))}
