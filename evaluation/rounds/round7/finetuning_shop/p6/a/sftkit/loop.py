import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F


def sft_loss(model, ids, labels):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def train_epoch(model, loader, opt, sched, accumulate):
    n = len(loader)
    running = 0.0
    for i, (ids, labels) in enumerate(loader):
        boundary = (i + 1) % accumulate == 0 or i + 1 == n
        with contextlib.nullcontext() if boundary else model.no_sync():
            loss = sft_loss(model, ids, labels)
            (loss / accumulate).backward()
        running += loss.item()
        if boundary:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
    return running / n


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    acc = torch.zeros(2)
    for ids, labels in loader:
        acc += torch.tensor([sft_loss(model.module, ids, labels).item() * len(ids), len(ids)])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()
