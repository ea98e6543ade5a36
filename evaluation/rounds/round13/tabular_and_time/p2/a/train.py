"""Card-fraud classifier with early stopping on validation AUC."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from callbacks import EarlyStopping, History
from data import splits
from metrics import StreamingAUC


@dataclass
class Config:
    seed: int = 5
    train_rows: int = 4000
    valid_rows: int = 1200
    batch_size: int = 100
    lr: float = 3e-3
    max_epochs: int = 40
    patience: int = 3
    pos_weight: float = 8.0


class FraudNet(nn.Sequential):
    def __init__(self, features=20, width=64):
        super().__init__(nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 1), nn.Flatten(0))


class Trainer:
    def __init__(self, cfg, rank):
        self.cfg, self.rank = cfg, rank
        train, valid = splits(cfg)
        self.sampler = DistributedSampler(train, seed=cfg.seed, drop_last=True)
        self.train_loader = DataLoader(train, cfg.batch_size, sampler=self.sampler)
        self.valid_loader = DataLoader(valid, 400, sampler=DistributedSampler(valid, shuffle=False))
        self.model = DDP(FraudNet())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(cfg.pos_weight))
        self.auc = StreamingAUC(bins=512, sync_on_compute=True)
        self.history, self.stopper = History(), EarlyStopping(cfg.patience)

    def fit(self):
        for epoch in range(self.cfg.max_epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.train_loader:
                self.opt.zero_grad()
                self.loss_fn(self.model(x), y).backward()
                self.opt.step()
            value = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch:2d} valid auc {value:.4f}", flush=True)
            stops = [cb.on_validation(epoch, value, self.model.module) for cb in (self.history, self.stopper)]
            if any(stops):
                break
        self.model.module.load_state_dict(self.stopper.weights)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        self.auc.reset()
        for x, y in self.valid_loader:
            self.auc.update(torch.sigmoid(self.model.module(x)), y)
        return self.auc.compute()

    def summary(self):
        """Collects what every rank measured, for the experiment log."""
        out = [None] * dist.get_world_size()
        dist.all_gather_object(out, {"best": self.stopper.best, "epoch": self.stopper.best_epoch, "n": len(self.history.rows)})
        return out


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    torch.manual_seed(cfg.seed)
    trainer = Trainer(cfg, dist.get_rank())
    trainer.fit()
    report = trainer.summary()
    if trainer.rank == 0:
        print("summary", report[0], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
