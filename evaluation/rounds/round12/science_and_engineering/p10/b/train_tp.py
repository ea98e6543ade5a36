import argparse
import tempfile
import os

import torch
import torch.distributed as dist
from torch import nn

from telemetry import Sampler, Telemetry
from tp_layers import SpectralSurrogate


def wake_batch(step, batch, modes):
    g = torch.Generator().manual_seed(step)
    c = torch.randn(batch, modes, 2, generator=g) / torch.arange(1, modes + 1).view(1, -1, 1)
    z = torch.view_as_complex(c)
    decay = torch.exp(-0.1 * torch.arange(modes) ** 1.5)
    wake = z * decay * torch.exp(1j * 0.4 * torch.arange(modes))
    wake = wake + 0.1 * z * z.abs()
    return c.flatten(1), torch.view_as_real(wake).flatten(1)


def sharded_norm(model, group):
    local = sum(p.grad.square().sum() for b in model.blocks for p in b.parameters())
    total = local.detach().reshape(1).clone()
    dist.all_reduce(total, group=group)
    common = sum(p.grad.square().sum() for m in (model.lift, model.drop) for p in m.parameters())
    return float((total + common).sqrt())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--modes", type=int, default=6)
    ap.add_argument("--clip", type=float, default=2.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(14)
    model = SpectralSurrogate(args.modes, width=24, hidden=48, depth=2, group=dist.group.WORLD)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    telemetry = sampler = None
    if rank == 0:
        telemetry = Telemetry(os.path.join(tempfile.mkdtemp(), "metrics.jsonl"))
        sampler = Sampler(telemetry)
        sampler.start()

    for step in range(args.steps):
        x, y = wake_batch(step, 64, args.modes)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        norm = sharded_norm(model, dist.group.WORLD)
        if norm > args.clip:
            for p in model.parameters():
                p.grad.mul_(args.clip / norm)
        opt.step()
        if telemetry is not None:
            telemetry.record("train/loss", loss.item(), step)
            if step % 4 == 0:
                telemetry.record("train/grad_norm", norm, step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f} norm {norm:.3f}", flush=True)

    if telemetry is not None:
        sampler.stop()
        telemetry.flush()
        print(f"metrics in {telemetry.path}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
