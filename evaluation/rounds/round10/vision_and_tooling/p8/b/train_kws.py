import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from kws.config import Config
from kws.features import load_features
from kws.model import KwsNet


def spec_augment(x, rng):
    """Blanks a random band of frequencies and a random stretch of time."""
    x = x.clone()
    f = rng.randrange(0, x.shape[2] - 4)
    t = rng.randrange(0, x.shape[1] - 3)
    x[:, :, f:f + 4] = 0
    x[:, t:t + 3] = 0
    return x


def setup(cfg):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cfg.seed += rank  # other dropout and augmentation on each rank
    random.seed(cfg.seed)
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    return rank


def accuracy(model, loader):
    hits = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            hits += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    model.train()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    cfg = Config.from_args()
    rank = setup(cfg)
    feats, labels = load_features(cfg, rank)
    ds = TensorDataset(torch.from_numpy(feats), torch.from_numpy(labels))
    cut = len(ds) * 4 // 5
    train, val = torch.utils.data.Subset(ds, range(cut)), torch.utils.data.Subset(ds, range(cut, len(ds)))
    sampler = DistributedSampler(train, seed=0, drop_last=True)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, cfg.batch, sampler=DistributedSampler(val, shuffle=False))

    model = DDP(KwsNet(feats.shape[2], cfg.width, cfg.classes))
    opt = torch.optim.Adam(model.parameters(), cfg.lr)
    rng = random.Random(random.random())
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(spec_augment(x, rng)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
