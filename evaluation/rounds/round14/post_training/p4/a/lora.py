"""Low-rank adapters on the linear layers of a frozen base model."""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

PRESETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}


@dataclass
class LoraConfig:
    targets: str = "attention,mlp,q_proj,v_proj"
    rank: int = 4
    alpha: float = 8.0
    dropout: float = 0.0

    def target_modules(self):
        """Expands presets of the comma list and removes duplicates."""
        names = []
        for item in self.targets.split(","):
            names.extend(PRESETS.get(item, [item]))
        return sorted(set(names))


class LoraLinear(nn.Module):
    def __init__(self, base, cfg):
        super().__init__()
        self.base = base
        self.scale = cfg.alpha / cfg.rank
        self.drop = nn.Dropout(cfg.dropout)
        self.lora_A = nn.Parameter(torch.empty(cfg.rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, cfg.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * (self.drop(x) @ self.lora_A.t() @ self.lora_B.t())


class LoraAdapter:
    """Owns the adapter parameters, in the order in which they were injected."""

    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.layers = {}
        for p in model.parameters():
            p.requires_grad_(False)
        for target in cfg.target_modules():
            self._inject(target)
        if not self.layers:
            raise ValueError(f"no module matches {cfg.targets!r}")

    def _inject(self, target):
        hits = [(n, m) for n, m in self.model.named_modules()
                if n.split(".")[-1] == target and isinstance(m, nn.Linear)]
        for name, module in hits:
            parent = self.model.get_submodule(name.rpartition(".")[0])
            layer = LoraLinear(module, self.cfg)
            setattr(parent, target, layer)
            self.layers[name] = layer

    def parameters(self):
        for layer in self.layers.values():
            yield layer.lora_A
            yield layer.lora_B

    def state_dict(self):
        return {f"{n}.{k}": getattr(l, k).detach().clone()
                for n, l in self.layers.items() for k in ("lora_A", "lora_B")}

    @torch.no_grad()
    def sync_from(self, src=0):
        for p in self.parameters():
            dist.broadcast(p, src=src)

    def average_gradients(self):
        world = dist.get_world_size()
        for p in self.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
