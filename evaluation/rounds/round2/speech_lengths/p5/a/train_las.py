"""Listen, attend and spell on made-up digits strings.  Settings: train_las.py [key=value ...]"""
import os
import random
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD, SOS, EOS = 0, 1, 2


@dataclass
class Config:
    epochs: int = 7
    utts: int = 96
    batch: int = 8
    lr: float = 0.004
    newbob_factor: float = 0.5
    newbob_threshold: float = 0.02
    dim: int = 32
    mels: int = 12
    time_mask: int = 6
    freq_mask: int = 3
    seed: int = 777
    out: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "las_out")

    @classmethod
    def from_argv(cls, argv):
        cfg = cls()
        kinds = {f.name: f.type for f in fields(cls)}
        for a in argv:
            k, v = a.split("=", 1)
            setattr(cfg, k, kinds[k](v) if callable(kinds[k]) else v)
        return cfg


class Speller(nn.Module):
    def __init__(self, cfg, vocab):
        super().__init__()
        self.listener = nn.GRU(cfg.mels * 2, cfg.dim, batch_first=True)
        self.embed = nn.Embedding(vocab, cfg.dim, padding_idx=PAD)
        self.decoder = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.out = nn.Linear(2 * cfg.dim, vocab)

    def forward(self, x, lens, y_in):
        if x.size(1) % 2:
            x = F.pad(x, (0, 0, 0, 1))
        h, _ = self.listener(x.reshape(x.size(0), x.size(1) // 2, -1))
        s, _ = self.decoder(self.embed(y_in))
        score = s @ h.transpose(1, 2) / h.size(-1) ** 0.5
        keep = torch.arange(h.size(1))[None] < ((lens + 1) // 2)[:, None]
        ctx = score.masked_fill(~keep[:, None], -1e4).softmax(-1) @ h
        return self.out(torch.cat([s, ctx], -1))


class AllreduceOptimizer:
    """Averages the gradients over the workers in step(), in flat blocks."""

    def __init__(self, opt, params, block=1 << 14):
        self.opt, self.params, self.block = opt, list(params), block

    def step(self):
        group, size = [], 0
        for p in self.params + [None]:
            if p is None or size + p.numel() > self.block:
                if group:
                    self._reduce(group)
                group, size = [], 0
            if p is not None:
                group.append(p)
                size += p.numel()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)

    def _reduce(self, group):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(group, flat.split([p.numel() for p in group])):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(g.view_as(p))


class NewBob:
    """Anneals the learning rate when the development loss no longer improves enough."""

    def __init__(self, opt, factor, threshold):
        self.opt, self.factor, self.threshold, self.last = opt, factor, threshold, None

    def __call__(self, value):
        if self.last is not None and (self.last - value) / self.last < self.threshold:
            for g in self.opt.param_groups:
                g["lr"] *= self.factor
        self.last = value
        return self.opt.param_groups[0]["lr"]


def make_utts(cfg, n, vocab, seed, snr=None):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, cfg.mels, generator=torch.Generator().manual_seed(3))
    utts = []
    for i in range(n):
        y = torch.randint(3, vocab, (int(torch.randint(2, 7, (1,), generator=g)),), generator=g)
        noise = snr[i % len(snr)] if snr else 0.5
        x = table[y].repeat_interleave(5, 0)
        utts.append((x + noise * torch.randn(x.shape, generator=g), y))
    return utts


def spec_augment(x, cfg, rng):
    x = x.clone()
    t = rng.randrange(cfg.time_mask + 1)
    t0 = rng.randrange(max(1, x.size(1) - t))
    x[:, t0 : t0 + t] = 0
    f = rng.randrange(cfg.freq_mask + 1)
    f0 = rng.randrange(cfg.mels - f)
    x[:, :, f0 : f0 + f] = 0
    return x


def collate(utts):
    pad = nn.utils.rnn.pad_sequence
    x = pad([u[0] for u in utts], batch_first=True)
    y_in = pad([torch.cat([torch.tensor([SOS]), u[1]]) for u in utts], batch_first=True)
    y_out = pad([torch.cat([u[1], torch.tensor([EOS])]) for u in utts], batch_first=True)
    return x, torch.tensor([len(u[0]) for u in utts]), y_in, y_out


def loss_of(model, x, lens, y_in, y_out):
    logits = model(x, lens, y_in)
    return F.cross_entropy(logits.flatten(0, 1), y_out.flatten(), ignore_index=PAD)


@torch.no_grad()
def dev_loss(model, utts, cfg):
    model.eval()
    total = torch.zeros(2)
    for i in range(0, len(utts), cfg.batch):
        part = utts[i : i + cfg.batch]
        total += torch.tensor([loss_of(model, *collate(part)).item() * len(part), len(part)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    cfg = Config.from_argv(sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    vocab = 13
    model = Speller(cfg, vocab)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    adam = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    opt = AllreduceOptimizer(adam, model.parameters())
    anneal = NewBob(adam, cfg.newbob_factor, cfg.newbob_threshold)
    augment_rng = random.Random(cfg.seed + rank)

    train = make_utts(cfg, cfg.utts, vocab, 10)
    # dev-clean and dev-other lie alternately in the list
    dev = make_utts(cfg, 32, vocab, 11, snr=[0.2, 4.0])[rank::world]
    steps = cfg.utts // (cfg.batch * world)
    for epoch in range(cfg.epochs):
        order = random.Random(epoch).sample(range(len(train)), len(train))
        model.train()
        for step in range(steps):
            first = (step * world + rank) * cfg.batch
            x, lens, y_in, y_out = collate([train[i] for i in order[first : first + cfg.batch]])
            loss = loss_of(model, spec_augment(x, cfg, augment_rng), lens, y_in, y_out)
            loss.backward()
            opt.step()
        value = dev_loss(model, dev, cfg)
        lr = anneal(value)
        print(f"[{rank}] epoch {epoch} train {loss.item():.3f} dev {value:.3f} lr {lr:.6f}", flush=True)
        if rank == 0:
            os.makedirs(cfg.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "epoch": epoch}, f"{cfg.out}/las.{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
