"""Small language model over event codes of a simulated instrument, split over the ranks."""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tp.model import TinyLM


class Codes:
    """Order-1 Markov chain; all ranks of the tensor parallel group read the same batches."""

    def __init__(self, vocab, length, seed):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(vocab, 0.15), vocab)
        seq = [0]
        for _ in range(length):
            seq.append(rng.choice(vocab, p=p[seq[-1]]))
        self.seq = torch.tensor(seq)

    def batch(self, n, context, gen):
        at = torch.randint(0, len(self.seq) - context - 1, (n,), generator=gen)
        rows = torch.stack([self.seq[i:i + context + 1] for i in at.tolist()])
        return rows[:, :-1], rows[:, 1:]


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    t = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.lr * 0.5 * (1 + math.cos(math.pi * t))


def save(model, step, folder):
    os.makedirs(folder, exist_ok=True)
    torch.save({"step": step, "model": model.state_dict()}, os.path.join(folder, f"shard{dist.get_rank()}.pt"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--context", type=int, default=24)
    p.add_argument("--vocab", type=int, default=24)
    p.add_argument("--log-every", type=int, default=15)
    p.add_argument("--ckpt", default="ckpt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    data = Codes(args.vocab, 4000, seed=8)
    model = TinyLM(args.vocab, 32, 4, 2, args.context)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    gen = torch.Generator().manual_seed(77)
    for step in range(args.steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, args)
        x, y = data.batch(args.batch, args.context, gen)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % args.log_every == 0 and dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    save(model, args.steps, args.ckpt)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
