import torch
import torch.nn.functional as F


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


@torch.no_grad()
def run_eval(net, loader):
    net.eval()
    loss, top1 = AverageMeter(), AverageMeter()
    for x, y in loader:
        out = net(x)
        loss.update(F.cross_entropy(out, y).item(), len(y))
        top1.update((out.argmax(1) == y).float().mean().item(), len(y))
    net.train()
    return torch.tensor([loss.avg, top1.avg])
