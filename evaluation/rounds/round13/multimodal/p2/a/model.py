import torch
import torch.nn as nn


class FusionTagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.towers = nn.ModuleDict({
            name: nn.Sequential(nn.Linear(s.in_dim, s.hidden), nn.ReLU(), nn.Linear(s.hidden, cfg.embed))
            for name, s in cfg.towers.items()})
        self.gates = nn.Parameter(torch.zeros(len(cfg.towers)))
        self.head = nn.Linear(cfg.embed, cfg.classes)

    def forward(self, inputs):
        stack = torch.stack([tower(inputs[name]) for name, tower in self.towers.items()], dim=1)
        weight = self.gates.softmax(0).view(1, -1, 1)
        return self.head((stack * weight).sum(1))


def select_towers(model, frozen):
    """Names of the towers that are fine-tuned; the others are put out of training."""
    unknown = set(frozen) - set(model.towers)
    if unknown:
        raise ValueError(f"cannot freeze {unknown}: no such tower")
    for name in frozen:
        model.towers[name].requires_grad_(False)
    return sorted(set(model.towers) - set(frozen))


def fusion_parameters(model):
    return [model.gates, *model.head.parameters()]
