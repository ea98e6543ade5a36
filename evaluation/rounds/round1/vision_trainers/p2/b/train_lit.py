"""Tissue tile classifier, a Lightning style module and the small Trainer that drives it."""
import argparse
import contextlib
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


def rank_zero_print(*a):
    if dist.get_rank() == 0:
        print(*a, flush=True)


class TileDataset(Dataset):
    """Tiles in the order of the slides; slides of the last scanner have less certain labels."""

    def __init__(self, n_slides, tiles_per_slide, seed, augment=False):
        g = torch.Generator().manual_seed(seed)
        n = n_slides * tiles_per_slide
        self.label = torch.randint(4, (n,), generator=g)
        base = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(99))
        self.tile = base[self.label] * 0.5 + torch.randn(n, 3, 10, 10, generator=g)
        late = torch.arange(n) >= n * 2 // 3
        flip = (torch.rand(n, generator=g) < 0.6) & late
        self.label[flip] = torch.randint(4, (int(flip.sum()),), generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        x = self.tile[i]
        if self.augment and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x, self.label[i]


class TileDataModule:
    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.train = TileDataset(12, 32, seed=3, augment=True)
        self.val = TileDataset(6, 32, seed=4)

    def train_dataloader(self):
        sampler = DistributedSampler(self.train, drop_last=True)
        return DataLoader(self.train, self.batch_size, sampler=sampler, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        # whole slides stay on one process, so that slide level scores can be made without a gather
        per = len(self.val) // dist.get_world_size()
        first = dist.get_rank() * per
        return DataLoader(Subset(self.val, range(first, first + per)), self.batch_size)


class LitModule(nn.Module):
    trainer = None

    def log(self, name, value, sync_dist=False):
        self.trainer.logged[name].append((value.detach().float(), sync_dist))


class LitTileClassifier(LitModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.ReLU())
        self.head = nn.Linear(24 * 4, 4)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))

    def training_step(self, net, batch):
        x, y = batch
        loss = F.cross_entropy(net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Callback:
    def on_validation_end(self, trainer, module): ...
    def on_fit_end(self, trainer, module): ...


class EarlyStopping(Callback):
    def __init__(self, monitor, patience, min_delta=0.0, mode="min"):
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1.0 if mode == "min" else -1.0
        self.best, self.wait = float("inf"), 0

    def on_validation_end(self, trainer, module):
        current = self.sign * trainer.callback_metrics[self.monitor]
        if current < self.best - self.min_delta:
            self.best, self.wait = current, 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            trainer.should_stop = True


class ModelCheckpoint(Callback):
    def __init__(self, dirpath, monitor):
        self.dirpath, self.monitor, self.best = dirpath, monitor, -1.0

    def on_validation_end(self, trainer, module):
        if dist.get_rank() == 0 and trainer.callback_metrics[self.monitor] > self.best:
            self.best = trainer.callback_metrics[self.monitor]
            if self.dirpath:
                os.makedirs(self.dirpath, exist_ok=True)
                torch.save(module.state_dict(), os.path.join(self.dirpath, "best.ckpt"))

    def on_fit_end(self, trainer, module):
        dist.barrier()
        rank_zero_print(f"best {self.monitor}: {self.best:.4f}")


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks = max_epochs, callbacks
        self.should_stop = False
        self.logged = defaultdict(list)
        self.callback_metrics = {}

    def _call(self, hook):
        for cb in self.callbacks:
            getattr(cb, hook)(self, self.module)

    def _epoch_end_metrics(self):
        for name, values in sorted(self.logged.items()):
            mean = torch.stack([v for v, _ in values]).mean()
            if values[0][1]:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.callback_metrics[name] = mean.item()
        self.logged.clear()

    @contextlib.contextmanager
    def _evaluating(self):
        self.module.eval()
        with torch.no_grad():
            yield
        self.module.train()

    def fit(self, module, datamodule):
        self.module, module.trainer = module, self
        net = DistributedDataParallel(module)
        optimizer = module.configure_optimizers()
        train_loader, val_loader = datamodule.train_dataloader(), datamodule.val_dataloader()
        for epoch in range(self.max_epochs):
            train_loader.sampler.set_epoch(epoch)
            for batch in train_loader:
                loss = module.training_step(net, batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            with self._evaluating():
                for batch in val_loader:
                    module.validation_step(batch)
            self._epoch_end_metrics()
            self._call("on_validation_end")
            rank_zero_print(f"epoch {epoch}: " + "  ".join(f"{k} {v:.4f}" for k, v in self.callback_metrics.items()))
            if self.should_stop:
                break
        self._call("on_fit_end")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max_epochs", type=int, default=14)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--dirpath", default=None)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    trainer = Trainer(args.max_epochs, [EarlyStopping("val_loss", patience=2, min_delta=1e-3),
                                        ModelCheckpoint(args.dirpath, monitor="val_acc")])
    trainer.fit(LitTileClassifier(args.lr), TileDataModule(args.batch_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
