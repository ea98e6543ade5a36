import logging
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

_logger = logging.getLogger("train")


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.sum += float(val) * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def sync(self):
        t = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(t)
        self.sum, self.count = t[0].item(), int(t[1].item())


def mixup(x, y, num_classes, alpha, generator):
    lam = float(torch.empty(1).uniform_(0.5, 1.0, generator=generator)) if alpha > 0 else 1.0
    target = F.one_hot(y, num_classes).float()
    return lam * x + (1 - lam) * x.flip(0), lam * target + (1 - lam) * target.flip(0)


def train_one_epoch(epoch, model, loader, optimizer, args, generator, model_ema=None):
    model.train()
    loader.sampler.set_epoch(epoch)
    losses, end = AverageMeter(), time.time()
    for batch_idx, (x, y) in enumerate(loader):
        x, target = mixup(x, y, args.num_classes, args.mixup, generator)
        loss = torch.sum(-target * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        losses.update(loss.item(), x.size(0))
        if model_ema is not None:
            model_ema.update(model.module)
        if args.rank == 0 and batch_idx % args.log_interval == 0:
            _logger.info("Train: %d [%3d/%d]  Loss: %.4f  Time: %.3fs", epoch, batch_idx, len(loader), losses.avg,
                         time.time() - end)
            end = time.time()
    losses.sync()
    return {"loss": losses.avg}


@torch.no_grad()
def validate(model, loader, distributed):
    losses, top1 = AverageMeter(), AverageMeter()
    for x, y in loader:
        out = model(x)
        losses.update(F.cross_entropy(out, y).item(), x.size(0))
        top1.update((out.argmax(1) == y).float().mean().item() * 100, x.size(0))
    if distributed:
        losses.sync()
        top1.sync()
    return {"loss": losses.avg, "top1": top1.avg}
