import argparse
import json
import math
import os
import time
from collections import defaultdict, deque
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn


class SmoothedValue:
    def __init__(self, window=20):
        self.deque = deque(maxlen=window)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.total += value * n
        self.count += n

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()

    @property
    def global_avg(self):
        return self.total / max(1, self.count)

    def __str__(self):
        return f"{sum(self.deque) / max(1, len(self.deque)):.4f} ({self.global_avg:.4f})"


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, n=1, **kw):
        for k, v in kw.items():
            self.meters[k].update(float(v), n)

    def synchronize_between_processes(self):
        for name in sorted(self.meters):
            self.meters[name].synchronize_between_processes()

    def log_every(self, iterable, freq, header):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield i, obj
            if i % freq == 0 and dist.get_rank() == 0:
                body = "  ".join(f"{k}: {m}" for k, m in self.meters.items())
                print(f"{header} [{i}/{len(iterable)}]  {body}  elapsed {time.time() - start:.1f}s", flush=True)


class TinyViT(nn.Module):
    def __init__(self, img=16, patch=4, dim=32, depth=2, heads=4, num_classes=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (img // patch) ** 2, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 2, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x).mean(1)))


class OptimizerStep:
    """Backward, clipping and the update of the weights in one call, as a loss scaler would do it."""

    def __init__(self, optimizer, clip_grad):
        self.optimizer, self.clip_grad = optimizer, clip_grad

    def __call__(self, loss, parameters, update_grad=True):
        loss.backward()
        if not update_grad:
            return None
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        t = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * t))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_one_epoch(model, criterion, loader, optimizer, step_fn, epoch, args):
    model.train()
    metric_logger = MetricLogger()
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for data_iter_step, (samples, targets) in metric_logger.log_every(loader, 10, f"Epoch: [{epoch}]"):
        if data_iter_step % accum_iter == 0:
            adjust_learning_rate(optimizer, data_iter_step / len(loader) + epoch, args)
        update_grad = (data_iter_step + 1) % accum_iter == 0
        with nullcontext() if update_grad else model.no_sync():
            loss = criterion(model(samples), targets)
            step_fn(loss / accum_iter, model.parameters(), update_grad=update_grad)
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    metric_logger.synchronize_between_processes()
    return {k: m.global_avg for k, m in metric_logger.meters.items()}


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    metric_logger = MetricLogger()
    for images, target in loader:
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        metric_logger.update(n=len(target), loss=loss.item(), acc1=(output.argmax(1) == target).float().mean() * 100)
    metric_logger.synchronize_between_processes()
    return {k: m.global_avg for k, m in metric_logger.meters.items()}


def build_loader(n, seed, batch_size, train):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(31))
    y = torch.randint(8, (n,), generator=g)
    ds = torch.utils.data.TensorDataset(0.4 * centers[y] + torch.randn(n, 3, 16, 16, generator=g), y)
    sampler = torch.utils.data.DistributedSampler(ds, shuffle=train)
    return torch.utils.data.DataLoader(ds, batch_size, sampler=sampler, drop_last=train)


def get_args():
    parser = argparse.ArgumentParser("fine-tuning")
    parser.add_argument("--batch_size", default=8, type=int)
    parser.add_argument("--accum_iter", default=4, type=int)
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--warmup_epochs", default=1, type=int)
    parser.add_argument("--lr", default=2e-3, type=float)
    parser.add_argument("--clip_grad", default=1.0, type=float)
    parser.add_argument("--smoothing", default=0.1, type=float)
    parser.add_argument("--output_dir", default="")
    parser.add_argument("--seed", default=0, type=int)
    return parser.parse_args()


def main(args):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(args.seed + dist.get_rank())
    torch.set_num_threads(1)
    train_loader = build_loader(768, 1, args.batch_size, train=True)
    val_loader = build_loader(256, 2, 64, train=False)
    model_without_ddp = TinyViT()
    model = nn.parallel.DistributedDataParallel(model_without_ddp)
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=args.lr, weight_decay=0.05)
    step_fn = OptimizerStep(optimizer, args.clip_grad)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    max_accuracy = 0.0
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train_stats = train_one_epoch(model, criterion, train_loader, optimizer, step_fn, epoch, args)
        test_stats = evaluate(model_without_ddp, val_loader)
        if dist.get_rank() == 0:
            if test_stats["acc1"] > max_accuracy and args.output_dir:
                os.makedirs(args.output_dir, exist_ok=True)
                torch.save({"model": model_without_ddp.state_dict(), "epoch": epoch},
                           os.path.join(args.output_dir, "checkpoint-best.pth"))
            max_accuracy = max(max_accuracy, test_stats["acc1"])
            stats = {**{f"train_{k}": v for k, v in train_stats.items()},
                     **{f"test_{k}": v for k, v in test_stats.items()}, "epoch": epoch}
            print(json.dumps({k: round(v, 5) for k, v in stats.items()}), flush=True)
    if dist.get_rank() == 0:
        print(f"Max accuracy: {max_accuracy:.2f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(get_args())
