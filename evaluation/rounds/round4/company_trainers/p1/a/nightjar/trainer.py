import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg["vocab"], cfg["dim"])
        self.pos = nn.Parameter(torch.randn(cfg["seq_len"], cfg["dim"]) * 0.02)
        self.blocks = nn.Sequential(*[Block(cfg["dim"], cfg["heads"]) for _ in range(cfg["layers"])])
        self.norm = nn.LayerNorm(cfg["dim"])
        self.head = nn.Linear(cfg["dim"], cfg["vocab"], bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tok(ids) + self.pos)))


class Trainer:
    def __init__(self, cfg, hooks):
        self.cfg = cfg
        self.hooks = hooks
        self.model = LM(cfg)
        self.ddp = DDP(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"], weight_decay=0.05)
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda s: min(1.0, (s + 1) / cfg["warmup"])
        )
        self.step = 0

    def loss(self, batch):
        ids, target = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = self.ddp(ids)
        per_token = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        mask = batch["mask"].flatten()
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)

    def fit(self, stream):
        accum = self.cfg["accum"]
        self.hooks.fire("fit_start", self)
        running = 0.0
        for i, batch in enumerate(stream, 1):
            boundary = i % accum == 0
            with contextlib.nullcontext() if boundary else self.ddp.no_sync():
                loss = self.loss(batch)
                (loss / accum).backward()
            running += loss.item() / accum
            self.hooks.fire("micro_end", self, batch=batch)
            if not boundary:
                continue
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad(set_to_none=True)
            self.step += 1
            self.hooks.fire("step_end", self, loss=running)
            running = 0.0
        self.hooks.fire("fit_end", self)
