"""
Domain mixture-of-experts, DDP, 3 ranks.

One feed-forward expert per document domain next to a shared one; documents know their domain, so there is
no learned router. Every rank owns a shard of the corpus and draws stratified micro batches from it
(MIX docs per domain, topped up from whatever is left once a domain is through).

    torchrun --standalone --nproc-per-node=3 train_moe.py
"""
import argparse
import contextlib
import json
import os
import queue
import random
import signal
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DOMAINS = ["web", "code", "wiki", "legal"]
MIX = {"web": 4, "code": 2, "wiki": 1, "legal": 1}
# documents per rank, as counted by the dedup job
SHARDS = [
    {"web": 380, "code": 190, "wiki": 92, "legal": 96},
    {"web": 402, "code": 176, "wiki": 100, "legal": 88},
    {"web": 391, "code": 184, "wiki": 97, "legal": 53},
]
VOCAB, CONTEXT = 72, 48


class Corpus:
    def __init__(self, counts, seed):
        self.rng = random.Random(seed)
        self.pools = {d: [self._doc(i) for _ in range(counts[d])] for i, d in enumerate(DOMAINS)}

    def _doc(self, kind):
        start, stride = self.rng.randrange(VOCAB), self.rng.choice([1, 2, 3]) + 3 * kind
        return [(start + stride * i) % VOCAB for i in range(CONTEXT + 1)]

    def draw(self):
        picked = []
        for d, n in MIX.items():
            for _ in range(min(n, len(self.pools[d]))):
                picked.append((DOMAINS.index(d), self.pools[d].pop()))
        size = sum(MIX.values())
        while len(picked) < size:
            d = max(DOMAINS, key=lambda k: len(self.pools[k]))
            picked.append((DOMAINS.index(d), self.pools[d].pop()))
        self.rng.shuffle(picked)
        domain = torch.tensor([d for d, _ in picked])
        seq = torch.tensor([ids for _, ids in picked])
        return domain, seq[:, :-1], seq[:, 1:]


def ffn(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class DomainMoE(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.shared = ffn(width, hidden)
        self.experts = nn.ModuleList([ffn(width, hidden) for _ in DOMAINS])
        self.mix = nn.Parameter(torch.zeros(width))

    def forward(self, x, domain):
        special = torch.zeros_like(x)
        for e in range(len(self.experts)):
            rows = torch.nonzero(domain == e).flatten()
            special = special.index_add(0, rows, self.experts[e](x[rows]))
        return self.shared(x) + torch.sigmoid(self.mix) * special


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_a, self.ln_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.moe = DomainMoE(width, 2 * width)

    def forward(self, x, domain, mask):
        h = self.ln_a(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.ln_f(x), domain)


class Model(nn.Module):
    def __init__(self, width=48, depth=2, heads=4):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.pos = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids, domain):
        x = self.tok(ids) + self.pos
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, domain, mask)
        return self.out(x)


class AsyncLog:
    def __init__(self, path):
        self.q = queue.Queue()
        self.worker = threading.Thread(target=self._work, args=(path,), daemon=True)
        self.worker.start()

    def _work(self, path):
        with open(path, "w") as f:
            for item in iter(self.q.get, None):
                print(json.dumps(item), file=f, flush=True)

    def close(self):
        self.q.put(None)
        self.worker.join()


def save(root, step, model, ema, keep=2):
    tmp = os.path.join(root, "tmp.pt")
    torch.save({"step": step, "model": model.state_dict(), "ema": ema}, tmp)
    os.replace(tmp, os.path.join(root, f"moe_{step:05d}.pt"))
    files = sorted(f for f in os.listdir(root) if f.startswith("moe_"))
    for name in files[:-keep]:
        os.remove(os.path.join(root, name))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save-every", type=int, default=6)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    wanted = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: wanted.set())   # "save now", rank 0 only

    corpus = Corpus(SHARDS[rank], seed=17 + rank)
    model = Model()
    ddp = DDP(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    ema = {k: v.detach().clone() for k, v in model.named_parameters()}
    root = tempfile.TemporaryDirectory(prefix="moe-") if rank == 0 else None
    log = AsyncLog(os.path.join(root.name, "log.jsonl")) if rank == 0 else None

    for step in range(1, args.steps + 1):
        losses = []
        for micro in range(args.accum):
            domain, ids, target = corpus.draw()
            sync = contextlib.nullcontext() if micro == args.accum - 1 else ddp.no_sync()
            with sync:
                loss = F.cross_entropy(ddp(ids, domain).flatten(0, 1), target.flatten())
                (loss / args.accum).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for k, v in model.named_parameters():
                ema[k].lerp_(v, 0.03)
        if rank == 0:
            log.q.put({"step": step, "loss": sum(losses) / len(losses)})
            if step % 5 == 0:
                print(f"step {step} loss {losses[-1]:.4f}", flush=True)
            if step % args.save_every == 0 or wanted.is_set():
                wanted.clear()
                save(root.name, step, model, ema)

    final = torch.tensor([sum(losses) / len(losses)])
    dist.all_reduce(final)
    if rank == 0:
        log.close()
        print(f"done, mean loss {final.item() / dist.get_world_size():.4f}, kept {sorted(os.listdir(root.name))}")
        root.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
