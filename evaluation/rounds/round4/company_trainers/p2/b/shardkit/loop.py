import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


class Loop:
    def __init__(self, cfg, model, buffer):
        self.cfg = cfg
        self.model = model
        self.buffer = buffer
        self.sinks = []
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.opt = torch.optim.AdamW(self.params, lr=cfg.lr, betas=(0.9, 0.95))
        self.gen = torch.Generator().manual_seed(cfg.seed * 1000 + dist.get_rank())
        self.ema = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.step = 0

    # data ---------------------------------------------------------------
    def micro_batch(self):
        c = self.cfg
        start = torch.randint(c.vocab, (c.batch, 1), generator=self.gen)
        stride = torch.randint(1, 6, (c.batch, 1), generator=self.gen)
        seq = (start + stride * torch.arange(c.context + 1)) % c.vocab
        noise = torch.rand(seq.shape, generator=self.gen) < 0.03
        seq = torch.where(noise, torch.randint(c.vocab, seq.shape, generator=self.gen), seq)
        return seq[:, :-1], seq[:, 1:]

    # losses -------------------------------------------------------------
    def z_weight(self):
        over = self.step - self.cfg.z_loss_from
        return self.cfg.z_loss * min(1.0, max(0.0, over / 8))

    def losses(self, ids, target):
        logits = self.model(ids).float()
        ce = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        z = logits.logsumexp(-1).pow(2).mean()
        return ce, z

    def lr_now(self):
        done = self.step / self.cfg.steps
        return self.cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    # one optimizer step -------------------------------------------------
    def train_step(self):
        for micro in range(self.cfg.accum):
            last = micro == self.cfg.accum - 1
            self.model.set_requires_gradient_sync(last)
            ce, z = self.losses(*self.micro_batch())
            ((ce + self.z_weight() * z) / self.cfg.accum).backward()
            self.buffer.add(loss=ce, z=z)
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.cfg.clip)
        for group in self.opt.param_groups:
            group["lr"] = self.lr_now()
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        # the head drifts first when the z-loss is too small
        self.buffer.add(grad_norm=norm, head_norm=self.model.lm_head.weight.norm(), lr=self.lr_now())

    @torch.no_grad()
    def update_ema(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.ema[name].lerp_(p, 1.0 - self.cfg.ema)

    def run(self):
        while self.step < self.cfg.steps:
            self.train_step()
            self.update_ema()
            if self.step % self.cfg.log_every == 0:
                for sink in self.sinks:
                    sink.write(self.step, self.buffer)
                self.buffer.clear()
        for sink in self.sinks:
            sink.close()

    def export_ema(self):
        """Full (unsharded) EMA weights; every rank takes part in the gather."""
        out = {}
        for name, value in self.ema.items():
            out[name] = value.full_tensor() if isinstance(value, DTensor) else value
        return out
