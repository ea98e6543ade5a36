import torch
import torch.distributed as dist


class SegMeter:
    """Running confusion matrix plus mean pixel loss over a validation pass."""

    def __init__(self, classes):
        self.classes = classes
        self.conf = torch.zeros(classes, classes, dtype=torch.float64)
        self.loss = torch.zeros(2, dtype=torch.float64)

    def update(self, logits, mask, loss):
        pred = logits.argmax(1)
        idx = (mask * self.classes + pred).flatten()
        self.conf += torch.bincount(idx, minlength=self.classes ** 2).view(self.classes, -1).double()
        self.loss += torch.tensor([loss.item() * mask.numel(), mask.numel()], dtype=torch.float64)

    def synchronize(self):
        dist.all_reduce(self.conf)
        return self

    def summary(self):
        tp = self.conf.diag()
        iou = tp / (self.conf.sum(0) + self.conf.sum(1) - tp).clamp(min=1)
        return {"miou": iou.mean().item(), "loss": (self.loss[0] / self.loss[1]).item()}
