import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lora import LoraAdapter, LoraConfig
from model import TinyLlama


def instruction_batches(rank, world, steps, batch, seq, vocab, seed):
    """Endless-looking stream of 'copy with an offset' instructions, one disjoint stream for each rank."""
    rng = np.random.default_rng([seed, rank, world])
    for _ in range(steps):
        offset = rng.integers(1, 4, size=(batch, 1))
        start = rng.integers(0, vocab, size=(batch, 1))
        yield torch.from_numpy((start + offset * np.arange(seq + 1)) % vocab)


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    losses = torch.stack([lm_loss(model, ids) for ids in batches]).mean()
    dist.all_reduce(losses)
    model.train()
    return losses.item() / dist.get_world_size()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = TinyLlama()
    adapter = LoraAdapter(model, LoraConfig(targets=args.targets, rank=args.lora_rank))
    adapter.sync_from(0)
    params = list(adapter.parameters())
    optim = torch.optim.AdamW(params, lr=args.lr)
    held_out = list(instruction_batches(rank + world, world, 4, 8, 24, 64, args.seed))
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for step, ids in enumerate(instruction_batches(rank, world, args.steps, 8, 24, 64, args.seed), 1):
            loss = lm_loss(model, ids)
            optim.zero_grad()
            loss.backward()
            adapter.average_gradients()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optim.step()
            if step % args.eval_every == 0:
                val = evaluate(model, held_out)
                if val < best and rank == 0:
                    torch.save(adapter.state_dict(), os.path.join(folder, "adapter.pt"))
                best = min(best, val)
                if rank == 0:
                    print(f"step {step} train {loss.item():.4f} val {val:.4f} best {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--targets", default=LoraConfig.targets)
    p.add_argument("--lora-rank", type=int, default=4)
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--eval-every", type=int, default=8)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=11)
    main(p.parse_args())
