import torch


class Ema:
    """Exponential moving average of the parameters of a module."""

    def __init__(self, module, decay=0.95, warmup=5):
        self.shadow = {k: v.detach().clone() for k, v in module.state_dict().items()}
        self.decay, self.warmup, self.updates = decay, warmup, 0

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (self.warmup + self.updates))
        for k, v in module.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - d)
            else:
                self.shadow[k].copy_(v)
