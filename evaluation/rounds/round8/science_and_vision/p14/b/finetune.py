"""Pre-train a morphology net on a broad survey, then fine-tune a new head on a deep one."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from morph.gradsync import GradientAverager
from morph.nets import MorphNet
from morph.survey import Survey


def broadcast_weights(model):
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)


def train(model, sync, survey, args, epochs, lr, rank, world, title):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        meter = torch.zeros(3)
        for x, y in survey.batches(epoch, args.batch, rank, world):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            sync.average()
            opt.step()
            meter += torch.tensor([loss.item(), (logits.argmax(1) == y).float().mean().item(), 1.0])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"{title} {epoch} loss {meter[0] / meter[2]:.3f} acc {meter[1] / meter[2]:.3f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--broad", type=int, default=192)
    p.add_argument("--deep", type=int, default=96)
    p.add_argument("--seed", type=int, default=15)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = MorphNet(classes=3)
    broadcast_weights(model)
    sync = GradientAverager(model, world)
    broad = Survey(args.broad, classes=3, noise=0.6, seed=args.seed)
    train(model, sync, broad, args, 2, 5e-3, rank, world, "broad")
    model.replace_head(classes=6)
    broadcast_weights(model)
    deep = Survey(args.deep, classes=6, noise=0.3, seed=args.seed + 1)
    train(model, sync, deep, args, 4, 5e-3, rank, world, "deep")
    if rank == 0:
        torch.save(model.state_dict(), "morph.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
