import json
import math
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    out: str = ""
    vocab: int = 200
    hidden: int = 48
    classes: int = 4
    rank_r: int = 4
    alpha: float = 8.0
    target: str = "q_proj,v_proj"
    lr: float = 5e-3
    epochs: int = 3
    batch: int = 16
    accum: int = 2
    patience: int = 2
    seed: int = 7

    @classmethod
    def from_argv(cls, argv):
        """key=value pairs on the command line"""
        types = {f.name: f.type for f in fields(cls)}
        kw = {}
        for item in argv:
            k, v = item.split("=", 1)
            kw[k] = types[k](v)
        cfg = cls(**kw)
        cfg.out = cfg.out or os.path.join(tempfile.gettempdir(), f"lora_{os.getppid()}")
        return cfg


class Accelerator:
    def __init__(self, accum):
        dist.init_process_group(backend="gloo")
        self.rank, self.world, self.accum = dist.get_rank(), dist.get_world_size(), accum
        self.is_main_process = self.rank == 0
        self._calls, self.sync_gradients = 0, True

    def prepare(self, *objects):
        return tuple(self._prepare_one(o) for o in objects)

    def _prepare_one(self, o):
        if isinstance(o, nn.Module):
            return DistributedDataParallel(o)
        if isinstance(o, DataLoader):
            shuffle = isinstance(o.sampler, torch.utils.data.RandomSampler)
            sampler = DistributedSampler(o.dataset, shuffle=shuffle)
            return DataLoader(o.dataset, o.batch_size, sampler=sampler, collate_fn=o.collate_fn)
        return o

    @contextmanager
    def accumulate(self, model, is_last):
        self._calls += 1
        self.sync_gradients = self._calls % self.accum == 0 or is_last
        if self.sync_gradients:
            self._calls = 0
            yield
        else:
            with model.no_sync():
                yield

    def unwrap_model(self, m):
        return getattr(m, "module", m)

    def gather_for_metrics(self, tensor, dataset_len):
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        # the sampler deals the examples out in turn and wraps around at the end
        return torch.stack(parts, 1).flatten(0, 1)[:dataset_len]

    def wait_for_everyone(self):
        dist.barrier()


class IntentDataset(Dataset):
    """Utterances whose class is given by the most frequent of four keyword groups."""

    def __init__(self, n, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            label = int(torch.randint(cfg.classes, (1,), generator=g))
            body = torch.randint(20, cfg.vocab, (int(torch.randint(4, 14, (1,), generator=g)),), generator=g)
            keys = torch.randint(1 + 4 * label, 5 + 4 * label, (4,), generator=g)
            self.rows.append((torch.cat([body, keys]), label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    return ids, torch.tensor([r[1] for r in rows])


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, keep):
        scores = self.q_proj(x) @ self.k_proj(x).transpose(1, 2) / math.sqrt(x.size(-1))
        return self.o_proj(scores.masked_fill(~keep[:, None], -1e9).softmax(-1) @ self.v_proj(x))


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.hidden, padding_idx=0)
        self.attn = nn.ModuleList(Attention(cfg.hidden) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(cfg.hidden) for _ in range(2))
        self.classifier = nn.Linear(cfg.hidden, cfg.classes)

    def forward(self, ids):
        keep = ids != 0
        x = self.embed(ids)
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x), keep)
        pooled = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return self.classifier(pooled)


class LoraLinear(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


def freeze_backbone(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier"))


def add_lora(model, cfg):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in cfg.target.split(","):
                setattr(parent, name, LoraLinear(child, cfg.rank_r, cfg.alpha))
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return n, sum(p.numel() for p in model.parameters())


def evaluate(acc, model, loader):
    model.eval()
    hits = []
    with torch.no_grad():
        for ids, y in loader:
            hits.append(acc.unwrap_model(model)(ids).argmax(-1).eq(y).float())
    model.train()
    return acc.gather_for_metrics(torch.cat(hits), len(loader.dataset)).mean().item()


def main():
    cfg = Config.from_argv(sys.argv[1:])
    acc = Accelerator(cfg.accum)
    torch.manual_seed(cfg.seed)
    model = Encoder(cfg)
    freeze_backbone(model)
    train = DataLoader(IntentDataset(602, cfg, 1), cfg.batch, shuffle=True, collate_fn=collate)
    valid = DataLoader(IntentDataset(101, cfg, 2), cfg.batch, collate_fn=collate)
    model, train, valid = acc.prepare(model, train, valid)
    trainable, total = add_lora(acc.unwrap_model(model), cfg)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=cfg.lr)
    if acc.is_main_process:
        print(f"trainable params: {trainable} || all params: {total} || {100 * trainable / total:.2f}%", flush=True)

    best, waited = 0.0, 0
    for epoch in range(cfg.epochs):
        train.sampler.set_epoch(epoch)
        for step, (ids, y) in enumerate(train, 1):
            with acc.accumulate(model, is_last=step == len(train)):
                loss = F.cross_entropy(model(ids), y)
                (loss / cfg.accum).backward()
            if acc.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
        accuracy = evaluate(acc, model, valid)
        if acc.is_main_process:
            print(json.dumps({"epoch": epoch, "loss": round(loss.item(), 4), "accuracy": accuracy}), flush=True)
        waited = 0 if accuracy > best else waited + 1
        if accuracy > best:
            best = accuracy
            if acc.is_main_process:
                os.makedirs(cfg.out, exist_ok=True)
                keep = {k: v for k, v in acc.unwrap_model(model).state_dict().items() if "lora_" in k or "classifier" in k}
                torch.save(keep, os.path.join(cfg.out, "adapter_model.bin"))
        if waited >= cfg.patience:
            break
    acc.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
