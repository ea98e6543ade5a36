"""FSDP2 pre-training loop with per-block activation checkpointing."""
from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EOS = 0


@dataclasses.dataclass
class ModelArgs:
    dim: int = 64
    n_layers: int = 3
    n_heads: int = 4
    vocab_size: int = 48
    max_seq_len: int = 48


@dataclasses.dataclass
class JobConfig:
    steps: int = 32
    local_batch_size: int = 4
    lr: float = 2e-3
    warmup_steps: int = 6
    max_norm: float = 1.0
    log_freq: int = 5
    sample_freq: int = 8
    ac: str = "full"
    seed: int = 0
    model: ModelArgs = dataclasses.field(default_factory=ModelArgs)

    @classmethod
    def from_cli(cls) -> "JobConfig":
        ap = argparse.ArgumentParser()
        for f in dataclasses.fields(cls):
            if f.name != "model":
                ap.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
        return cls(**vars(ap.parse_args()))


class TransformerBlock(nn.Module):
    def __init__(self, a: ModelArgs):
        super().__init__()
        self.n_heads = a.n_heads
        self.attention_norm = nn.RMSNorm(a.dim)
        self.ffn_norm = nn.RMSNorm(a.dim)
        self.wqkv = nn.Linear(a.dim, 3 * a.dim, bias=False)
        self.wo = nn.Linear(a.dim, a.dim, bias=False)
        self.w1 = nn.Linear(a.dim, 2 * a.dim, bias=False)
        self.w2 = nn.Linear(2 * a.dim, a.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bs, n, d = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).view(bs, n, 3, self.n_heads, -1).unbind(2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        h = x + self.wo(out.transpose(1, 2).reshape(bs, n, d))
        return h + self.w2(F.silu(self.w1(self.ffn_norm(h))))


class Transformer(nn.Module):
    def __init__(self, a: ModelArgs):
        super().__init__()
        self.tok_embeddings = nn.Embedding(a.vocab_size, a.dim)
        self.pos_embeddings = nn.Embedding(a.max_seq_len, a.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(a) for i in range(a.n_layers)})
        self.norm = nn.RMSNorm(a.dim)
        self.output = nn.Linear(a.dim, a.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def parallelize(model: Transformer, mesh, cfg: JobConfig) -> Transformer:
    if cfg.ac == "full":
        for name, block in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class MetricsProcessor:
    """Collects throughput and loss and prints a line every `log_freq` steps."""

    def __init__(self, cfg: JobConfig, rank: int, world: int):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.ntokens, self.since = 0, time.perf_counter()

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.cfg.log_freq == 0

    def log(self, step: int, loss: float, grad_norm: torch.Tensor, lr: float) -> None:
        norm = grad_norm.full_tensor().item()
        if self.rank != 0:
            return
        now = time.perf_counter()
        tps = self.ntokens / (now - self.since)
        print(f"step: {step:3d}  loss: {loss:7.4f}  grad_norm: {norm:6.3f}  lr: {lr:.2e}  tps: {tps:,.0f}", flush=True)
        self.ntokens, self.since = 0, now


def batches(cfg: JobConfig, rank: int):
    """Short documents packed back to back, each closed by EOS."""
    g = torch.Generator().manual_seed(cfg.seed * 1000 + rank)
    a = cfg.model
    while True:
        seq = torch.randint(1, a.vocab_size, (cfg.local_batch_size, a.max_seq_len + 1), generator=g).cummax(1).values
        seq[torch.rand(seq.shape, generator=g) < 0.25] = EOS
        yield seq[:, :-1], seq[:, 1:]


@torch.no_grad()
def sample(model: Transformer, prompt: torch.Tensor, max_new: int, gen: torch.Generator, group) -> torch.Tensor:
    model.eval()
    out, done = prompt, torch.zeros(prompt.size(0), dtype=torch.bool)
    for _ in range(max_new):
        probs = model(out)[:, -1].softmax(-1)
        nxt = torch.multinomial(probs, 1, generator=gen).masked_fill(done[:, None], EOS)
        out = torch.cat((out, nxt), 1)
        done |= nxt[:, 0] == EOS
        open_rows = (~done).sum()
        dist.all_reduce(open_rows, group=group)
        if open_rows == 0:
            break
    model.train()
    return out


class Trainer:
    def __init__(self, cfg: JobConfig):
        self.cfg = cfg
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(cfg.seed)
        self.model = parallelize(Transformer(cfg.model), self.mesh, cfg)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_scale)
        self.metrics = MetricsProcessor(cfg, self.rank, self.world)
        self.data = batches(cfg, self.rank)
        self.gen = torch.Generator().manual_seed(cfg.seed + 31 * self.rank)

    def _lr_scale(self, step: int) -> float:
        if step < self.cfg.warmup_steps:
            return (step + 1) / self.cfg.warmup_steps
        done = (step - self.cfg.warmup_steps) / (self.cfg.steps - self.cfg.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def train_step(self):
        tokens, labels = next(self.data)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm, foreach=False)
        self.optimizer.step()
        self.scheduler.step()
        self.metrics.ntokens += tokens.numel() * self.world
        return loss.detach(), grad_norm

    def train(self) -> None:
        for step in range(1, self.cfg.steps + 1):
            loss, grad_norm = self.train_step()
            if self.metrics.should_log(step):
                dist.all_reduce(loss, group=self.mesh.get_group())
                self.metrics.log(step, loss.item() / self.world, grad_norm, self.scheduler.get_last_lr()[0])
            if step % self.cfg.sample_freq == 0:
                tokens, _ = next(self.data)
                text = sample(self.model, tokens[:2, :8], 32, self.gen, self.mesh.get_group())
                print(f"step: {step:3d}  rank {self.rank} wrote {text[0, 8:].tolist()}", flush=True)

    def save(self) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            n = sum(w.numel() for w in weights.values())
            print(f"gathered {len(weights)} tensors, {n:,} values", flush=True)


if __name__ == "__main__":
    trainer = Trainer(JobConfig.from_cli())
    trainer.train()
    trainer.save()
    dist.destroy_process_group()
