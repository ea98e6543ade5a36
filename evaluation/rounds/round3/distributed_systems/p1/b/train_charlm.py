"""Character LM with stochastic depth and a hand-written overlapping gradient reducer.

Gradients are packed into one flat slot per top-level unit (embedding, each
residual block, head).  As soon as all gradients of a unit have been
accumulated the slot is all-reduced in the background, while autograd is
still busy with the layers below it.

    torchrun --nproc-per-node=2 train_charlm.py
"""
import logging
import os
import time
from dataclasses import dataclass, field
from typing import List, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("charlm")


@dataclass
class Config:
    seed: int = 46
    vocab: int = 64
    dim: int = 96
    context: int = 24
    n_blocks: int = 5
    layer_drop: float = 0.05
    batch_size: int = 16
    steps: int = 200
    eval_every: int = 10
    lr: float = 2e-3
    warmup: int = 30
    clip: float = 1.0
    out_dir: str = "out_charlm"


class CausalMix(nn.Module):
    """Residual block: causal depthwise mixing over time followed by an MLP."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.dim)
        self.mix = nn.Parameter(torch.zeros(cfg.context, cfg.context))
        self.fc1 = nn.Linear(cfg.dim, 2 * cfg.dim)
        self.fc2 = nn.Linear(2 * cfg.dim, cfg.dim)
        self.register_buffer("mask", torch.tril(torch.ones(cfg.context, cfg.context)))

    def forward(self, x):
        w = self.mix.masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        h = torch.einsum("ts,bsd->btd", w, self.norm(x))
        return x + self.fc2(F.gelu(self.fc1(h)))


class CharLM(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.layer_drop = cfg.layer_drop
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(CausalMix(cfg) for _ in range(cfg.n_blocks))
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.training and torch.rand(()).item() < self.layer_drop:
                continue
            x = block(x)
        return self.head(x)

    def units(self) -> List[nn.Module]:
        return [self.embed, *self.blocks, self.head]


@dataclass
class Slot:
    params: List[nn.Parameter]
    flat: torch.Tensor
    offsets: List[int] = field(default_factory=list)
    pending: int = 0
    work: Optional[dist.Work] = None


class OverlapReducer:
    def __init__(self, units: List[nn.Module], group: dist.ProcessGroup):
        self.group = group
        self.world = dist.get_world_size(group)
        # every slot has the same length, so that the buffers can be recycled
        size = max(sum(p.numel() for p in u.parameters()) for u in units)
        self.slots: List[Slot] = []
        self._where = {}
        for unit in reversed(units):
            slot = Slot(list(unit.parameters()), torch.zeros(size))
            at = 0
            for i, p in enumerate(slot.params):
                slot.offsets.append(at)
                at += p.numel()
                self._where[p] = (slot, i)
                p.register_post_accumulate_grad_hook(self._on_grad)
            slot.pending = len(slot.params)
            self.slots.append(slot)
        self.cursor = 0

    def _view(self, slot: Slot, i: int) -> torch.Tensor:
        p = slot.params[i]
        return slot.flat[slot.offsets[i]:slot.offsets[i] + p.numel()].view_as(p)

    def _launch(self, slot: Slot):
        slot.flat.div_(self.world)
        slot.work = dist.all_reduce(slot.flat, group=self.group, async_op=True)

    def _on_grad(self, p: nn.Parameter):
        slot, i = self._where[p]
        self._view(slot, i).copy_(p.grad)
        slot.pending -= 1
        # slots go out in list order, whatever order they fill up in
        while self.cursor < len(self.slots) and self.slots[self.cursor].pending == 0:
            self._launch(self.slots[self.cursor])
            self.cursor += 1

    def finish(self):
        """Send what is left, wait for everything, write the means to .grad."""
        for slot in self.slots[self.cursor:]:
            self._launch(slot)
        for slot in self.slots:
            slot.work.wait()
            for i, p in enumerate(slot.params):
                p.grad = self._view(slot, i).clone()
            slot.work = None
            slot.pending = len(slot.params)
            slot.flat.zero_()
        self.cursor = 0


def make_corpus(cfg: Config, n: int = 40_000) -> torch.Tensor:
    g = torch.Generator().manual_seed(cfg.seed)
    table = torch.randint(0, cfg.vocab, (cfg.vocab, 4), generator=g)
    picks = torch.randint(0, 4, (n,), generator=g)
    text = [1]
    for k in picks.tolist():
        text.append(int(table[text[-1], k]))
    return torch.tensor(text)


def get_batch(text, cfg: Config):
    at = torch.randint(0, len(text) - cfg.context - 1, (cfg.batch_size,))
    x = torch.stack([text[i:i + cfg.context] for i in at.tolist()])
    y = torch.stack([text[i + 1:i + cfg.context + 1] for i in at.tolist()])
    return x, y


@torch.no_grad()
def evaluate(model, text, cfg: Config, batches: int = 2) -> float:
    model.eval()
    total = torch.zeros(2)
    for _ in range(batches):
        x, y = get_batch(text, cfg)
        total += torch.tensor([F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item(), 1.0])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format=f"%(asctime)s r{rank} %(message)s")
    os.makedirs(cfg.out_dir, exist_ok=True)

    torch.manual_seed(cfg.seed)
    model = CharLM(cfg)
    text = make_corpus(cfg)
    train, valid = text[:36_000], text[36_000:]
    torch.manual_seed(cfg.seed + 1000 * (rank + 1))

    reducer = OverlapReducer(model.units(), dist.new_group())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / cfg.warmup))

    t0 = time.time()
    for step in range(1, cfg.steps + 1):
        x, y = get_batch(train, cfg)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        reducer.finish()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        opt.step()
        sched.step()
        if step % cfg.eval_every == 0:
            val = evaluate(model, valid, cfg)
            log.info("step %d train %.3f valid %.3f (%.1f it/s)", step, loss.item(), val,
                     step / (time.time() - t0))
            if rank == 0:
                torch.save(model.state_dict(), os.path.join(cfg.out_dir, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
