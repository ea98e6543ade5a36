import argparse

import torch
import torch.distributed as dist

from pipe import PipeStage
from stages import stage_for


def burgers_batch(step, batch, points):
    """Initial velocities and the velocities a little later (one smoothed upwind step)."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.linspace(0, 2 * torch.pi, points + 1)[:-1]
    amp = torch.rand(batch, 3, generator=g)
    phase = torch.rand(batch, 3, generator=g) * 6.28
    u = sum(amp[:, k:k + 1] * torch.sin((k + 1) * x + phase[:, k:k + 1]) for k in range(3))
    v = u
    for _ in range(4):
        v = v - 0.05 * v * (v - v.roll(1, -1)) * 4 + 0.1 * (v.roll(1, -1) - 2 * v + v.roll(-1, -1))
    return u.unsqueeze(1), v.unsqueeze(1)


def evaluate(stage, last, args):
    with torch.no_grad():
        u, v = burgers_batch(10_000, args.micro * args.microbatches, args.points)
        outs = stage.fill(args.microbatches, u.split(args.micro))
    error = torch.zeros(1)
    if last:
        error += (torch.cat(outs) - v).abs().mean()
    dist.broadcast(error, src=dist.get_world_size() - 1)
    return float(error)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--microbatches", type=int, default=4)
    ap.add_argument("--points", type=int, default=48)
    ap.add_argument("--width", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1

    module = stage_for(rank, world, args.width)
    stage = PipeStage(module, rank, world, args.width, args.micro, args.points)
    opt = torch.optim.Adam(module.parameters(), lr=4e-3)
    if last:
        before = f"{sum(p.numel() for p in module.parameters())} parameters on the last stage"
        print(before, flush=True)

    for step in range(args.steps):
        u, v = burgers_batch(step, args.micro * args.microbatches, args.points)
        opt.zero_grad()
        stage.fill(args.microbatches, u.split(args.micro))
        if last:
            loss = stage.drain_loss(v.split(args.micro))
            if step % 6 == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
        else:
            stage.drain()
        opt.step()

    error = evaluate(stage, last, args)
    if rank == 0:
        print(f"mean absolute error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
