import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tsf.model import GRUForecaster, pinball
from tsf.synth import write_turbines
from tsf.windows import WindowSet


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="scada")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--context", type=int, default=24)
    ap.add_argument("--horizon", type=int, default=6)
    return ap.parse_args()


def run_epoch(model, loader, opt):
    model.train()
    seen, total = 0, 0.0
    for x, y in loader:
        loss = pinball(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen += len(x)
        total += loss.item() * len(x)
    return total / seen


@torch.no_grad()
def validate(net, loader):
    net.eval()
    errors = [(net(x) - y).abs().mean(dim=1) for x, y in loader]
    mine = torch.cat(errors).mean().reshape(1)
    parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = os.path.abspath(args.data)
    if rank == 0:
        write_turbines(folder)
    dist.barrier()

    train = WindowSet(folder, args.context, args.horizon, stride=4, part="train")
    valid = WindowSet(folder, args.context, args.horizon, stride=6, part="valid")
    torch.manual_seed(11)
    model = DDP(GRUForecaster(horizon=args.horizon))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    shuffle = torch.Generator().manual_seed(rank)
    train_loader = DataLoader(train, batch_size=args.batch, shuffle=True, generator=shuffle)
    valid_loader = DataLoader(valid, batch_size=64)
    if rank == 0:
        print(f"context {args.context} horizon {args.horizon}: {len(train_loader)} batches per epoch")

    for epoch in range(args.epochs):
        loss = run_epoch(model, train_loader, opt)
        mae = validate(model.module, valid_loader)
        sched.step()
        if rank == 0:
            print(f"epoch {epoch}: train {loss:.4f}  valid MAE {mae.mean():.4f} (worst {mae.max():.4f})", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(folder, "forecaster.pt"))
        print("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
