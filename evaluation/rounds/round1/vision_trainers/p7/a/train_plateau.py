#!/usr/bin/env python3
"""Digit patches: train on all processes, score on the first one, everybody follows its verdict."""
import argparse
import copy
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ScoreBoard:
    """Scores travel over the key value store: a scoring that takes an hour must not run into
    the time limit of a collective."""

    def __init__(self, name):
        self.store = dist.PrefixStore(name, _get_default_store())

    def publish(self, epoch, score):
        self.store.set(f"epoch{epoch}", repr(score))

    def read(self, epoch):
        return float(self.store.get(f"epoch{epoch}").decode())


class RandomErase:
    def __init__(self, p, size, seed):
        self.p, self.size = p, size
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        x = x.clone()
        for img in x:
            if float(torch.rand((), generator=self.g)) < self.p:
                r, c = torch.randint(0, x.shape[-1] - self.size, (2,), generator=self.g).tolist()
                img[:, r:r + self.size, c:c + self.size] = 0
        return x


class Ema:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval()
        self.decay = decay

    @torch.no_grad()
    def step(self, net):
        for e, p in zip(self.net.parameters(), net.parameters()):
            e.lerp_(p, 1 - self.decay)
        for e, b in zip(self.net.buffers(), net.buffers()):
            e.copy_(b)


def patches(n, seed):
    g = torch.Generator().manual_seed(seed)
    glyphs = torch.randn(10, 1, 11, 11, generator=torch.Generator().manual_seed(77))
    y = torch.randint(10, (n,), generator=g)
    return TensorDataset(0.55 * glyphs[y] + torch.randn(n, 1, 11, 11, generator=g), y)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(),
                            nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 16, 10))
        self.ema = Ema(net, args.ema_decay)
        self.ddp = DistributedDataParallel(net)
        self.opt = optim.SGD(self.ddp.parameters(), lr=args.lr, momentum=0.9)
        self.plateau = optim.lr_scheduler.ReduceLROnPlateau(self.opt, mode="max", factor=0.3, patience=0)
        train = patches(600, 1)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.train_loader = DataLoader(train, args.batch_size, sampler=self.sampler, drop_last=True)
        self.val_loader = DataLoader(patches(300, 2), 50) if self.is_main else None
        self.erase = RandomErase(0.3, 4, args.seed + self.rank)
        self.board = ScoreBoard("val")
        self.best_score, self.best_epoch = -1.0, -1
        self.start_epoch = 0

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.ddp.train()
        for x, y in self.train_loader:
            loss = nn.functional.cross_entropy(self.ddp(self.erase(x)), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.ema.step(self.ddp.module)

    @torch.no_grad()
    def accuracy(self, net):
        right = sum((net(x).argmax(1) == y).sum().item() for x, y in self.val_loader)
        return right / len(self.val_loader.dataset)

    def score(self, epoch):
        """Main process only. The better of the plain and the averaged weights counts."""
        self.ddp.eval()
        plain, averaged = self.accuracy(self.ddp.module), self.accuracy(self.ema.net)
        score = max(plain, averaged)
        print(f"epoch {epoch:3d} | acc {plain:.4f} | ema {averaged:.4f} | lr {self.opt.param_groups[0]['lr']:.5f}",
              flush=True)
        self.board.publish(epoch, score)
        if score <= self.best_score:
            return score
        self.save(epoch, score, self.ema.net if averaged > plain else self.ddp.module)
        return score

    def save(self, epoch, score, net):
        if self.args.save_dir is None:
            return
        self.args.save_dir.mkdir(parents=True, exist_ok=True)
        torch.save({"epoch": epoch, "score": score, "net": net.state_dict()}, self.args.save_dir / "best.pt")

    def run(self):
        for epoch in range(self.start_epoch, self.args.epochs):
            self.train_epoch(epoch)
            score = self.score(epoch) if self.is_main else self.board.read(epoch)
            self.plateau.step(score)
            if score > self.best_score:
                self.best_score, self.best_epoch = score, epoch
            elif epoch - self.best_epoch >= self.args.patience:
                break
        dist.barrier()
        return self.best_score


def parse(argv):
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--ema-decay", type=float, default=0.9)
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--save-dir", type=pathlib.Path)
    ap.add_argument("--seed", type=int, default=8)
    return ap.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    best = Trainer(args).run()
    if dist.get_rank() == 0:
        print(f"done, best accuracy {best:.4f}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
