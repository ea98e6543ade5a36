import torch
import torch.distributed as dist
import torch.nn.functional as F

from .meters import SegMeter


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.stale = float("inf"), 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        return self.stale >= self.patience


@torch.no_grad()
def evaluate(model, loader):
    meter = SegMeter(2)
    model.eval()
    for img, mask in loader:
        logits = model.module(img)
        meter.update(logits, mask, F.cross_entropy(logits, mask))
    model.train()
    return meter.synchronize().summary()


def train_epoch(model, loader, opt):
    for img, mask in loader:
        loss = F.cross_entropy(model(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()


def fit(model, train_loader, sampler, val_loader, opt, cfg, rank):
    stopper = EarlyStopping(cfg["patience"], cfg["min_delta"])
    history = []
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, opt)
        scores = evaluate(model, val_loader)
        history.append(scores)
        if rank == 0:
            print(f"epoch {epoch} miou {scores['miou']:.4f} val {scores['loss']:.4f}", flush=True)
        if stopper.step(scores["loss"]):
            break
    epochs = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, len(history))
    return history, epochs
