import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from loss_scale import DynamicLossScaler
from model import build


def args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=24)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=2e-3)
    return p.parse_args()


def zipf_batches(batch, seq, vocab, seed):
    """Token ids with the usual long tail: small ids are frequent."""
    g = torch.Generator().manual_seed(seed)
    p = 1.0 / torch.arange(1, vocab + 1)
    while True:
        ids = torch.multinomial(p, batch * seq, replacement=True, generator=g)
        yield ids.view(batch, seq)


def step_once(model, opt, scaler, batches, a):
    total = 0.0
    for micro in range(a.accum):
        model.set_requires_gradient_sync(micro == a.accum - 1)
        ids = next(batches)
        out = model(ids[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()) / a.accum
        scaler.scale(loss).backward()
        total += loss.item()
    params = list(model.parameters())
    norm = None
    if scaler.unscale(params):
        norm = torch.nn.utils.clip_grad_norm_(params, a.clip).full_tensor().item()
        opt.step()
    opt.zero_grad(set_to_none=True)
    return total, norm


def main():
    a = args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(seed=4)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    scaler = DynamicLossScaler(init=2.0**14)
    batches = zipf_batches(a.batch, a.seq, 64, seed=50 + rank)

    for step in range(1, a.steps + 1):
        loss, norm = step_once(model, opt, scaler, batches, a)
        if rank == 0 and step % 6 == 0:
            shown = "skipped" if norm is None else f"{norm:.3f}"
            print(f"step {step} loss {loss:.3f} grad norm {shown} scale {scaler.scale_value:.0f}", flush=True)

    if rank == 0:
        print(f"skipped steps: {scaler.skipped}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
