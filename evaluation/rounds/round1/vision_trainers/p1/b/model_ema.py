from copy import deepcopy

import torch


class ModelEma:
    """Moving average of weights and buffers, kept on the primary process.

    The decay is warmed up so that the average follows the weights closely in the first updates.
    """

    def __init__(self, model, decay=0.99):
        self.module = deepcopy(model)
        self.decay = decay
        self.updates = 0
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for avg, cur in zip(self.module.state_dict().values(), model.state_dict().values()):
            if avg.dtype.is_floating_point:
                avg.mul_(d).add_(cur, alpha=1 - d)
            else:
                avg.copy_(cur)

    def state_dict(self):
        return {"module": self.module.state_dict(), "updates": self.updates}
