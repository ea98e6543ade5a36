# Speedrun-style script: flat binary shards, background reader, DDP, gradient accumulation.
import glob
import math
import os
import queue
import sys
import tempfile
import threading
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# config, override with key=value on the command line
data_root = ""
n_layer, n_head, n_embd = 2, 4, 64
vocab_size = 256
B, T = 4, 64
grad_accum = 2
num_iterations = 40
warmup_iters, warmdown_iters = 5, 15
learning_rate = 3e-3
val_loss_every = 20
val_steps = 4
shard_tokens = (9000, 7000, 9500)
for arg in sys.argv[1:]:
    k, v = arg.split("=")
    globals()[k] = type(globals()[k])(v)

MAGIC = 20240520


def write_shard(path, n, rng):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, 1, n
    walk = np.cumsum(rng.integers(1, 4, size=n)) % vocab_size
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(walk.astype(np.uint16).tobytes())


def load_shard(path):
    with open(path, "rb") as f:
        header = np.frombuffer(f.read(256 * 4), dtype=np.int32)
        assert header[0] == MAGIC, "magic number mismatch in the data .bin file"
        assert header[1] == 1, "unsupported version"
        tokens = np.frombuffer(f.read(), dtype=np.uint16)
    assert len(tokens) == header[2], "number of tokens read does not match header"
    return tokens


class DistributedDataLoader:
    """All ranks walk the same shards; within a step each takes its own slice of B*T tokens."""

    def __init__(self, pattern, B, T, rank, world):
        self.files = sorted(glob.glob(pattern))
        self.B, self.T, self.rank, self.world = B, T, rank, world
        self.reset()

    def reset(self):
        self.shard = -1
        self.advance()

    def advance(self):
        self.shard = (self.shard + 1) % len(self.files)
        self.pos = 0
        self.tokens = load_shard(self.files[self.shard])

    def next_batch(self):
        span = self.B * self.T
        if self.pos + span + 1 > len(self.tokens):
            self.advance()
        lo = self.pos + self.rank * span
        buf = torch.from_numpy(self.tokens[lo:lo + span + 1].astype(np.int64))
        self.pos += span * self.world
        return buf[:-1].view(self.B, self.T), buf[1:].view(self.B, self.T)


class Prefetcher:
    def __init__(self, loader, depth=4):
        self.loader = loader
        self.q = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()

    def _fill(self):
        while True:
            self.q.put(self.loader.next_batch())

    def next_batch(self):
        return self.q.get()


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (z.view(b, t, n_head, c // n_head).transpose(1, 2) for z in (q, k, v))
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = CausalSelfAttention()
        self.fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.fc_out = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        x = x + self.attn(F.rms_norm(x, (n_embd,)))
        return x + self.fc_out(F.relu(self.fc(F.rms_norm(x, (n_embd,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(T, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, (n_embd,)))
        return F.cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


def get_lr(it):
    if it < warmup_iters:
        return (it + 1) / warmup_iters
    if it < num_iterations - warmdown_iters:
        return 1.0
    return max((num_iterations - it) / warmdown_iters, 0.05)


dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
master = rank == 0


def print0(s):
    if master:
        print(s, flush=True)


root = [data_root]
if master and not data_root:
    root[0] = tempfile.mkdtemp(prefix="fineweb_")
    rng = np.random.default_rng(0)
    for i, n in enumerate(shard_tokens):
        write_shard(os.path.join(root[0], f"train_{i:06d}.bin"), n, rng)
    write_shard(os.path.join(root[0], "val_000000.bin"), 6000, rng)
dist.broadcast_object_list(root, src=0)

torch.manual_seed(42)
train_loader = Prefetcher(DistributedDataLoader(os.path.join(root[0], "train_*.bin"), B, T, rank, world))
val_loader = DistributedDataLoader(os.path.join(root[0], "val_*.bin"), B, T, rank, world)
raw_model = GPT()
model = DDP(raw_model)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr)

t0 = time.perf_counter()
for it in range(num_iterations + 1):
    last = it == num_iterations
    if last or it % val_loss_every == 0:
        raw_model.eval()
        val_loader.reset()
        with torch.no_grad():
            val_loss = sum(raw_model(*val_loader.next_batch()) for _ in range(val_steps)) / val_steps
        dist.all_reduce(val_loss, op=dist.ReduceOp.SUM)
        print0(f"step:{it}/{num_iterations} val_loss:{val_loss.item() / world:.4f} ppl:{math.exp(val_loss.item() / world):.1f}")
        raw_model.train()
    if last:
        break
    for micro in range(grad_accum):
        x, y = train_loader.next_batch()
        with model.no_sync() if micro < grad_accum - 1 else nullcontext():
            loss = model(x, y) / grad_accum
            loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print0(f"step:{it + 1}/{num_iterations} train_loss:{loss.item() * grad_accum:.4f} time:{time.perf_counter() - t0:.2f}s")

dist.destroy_process_group()
