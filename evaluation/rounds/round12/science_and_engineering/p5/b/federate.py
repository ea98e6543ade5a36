import argparse

import torch
import torch.distributed as dist
from torch import nn

from clients import Plant, reference_set
from fedavg import FederatedAverage


def pump_model():
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def local_training(model, anchor, plant, args):
    """A pass over the data of the plant, with a proximal pull towards the global model."""
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    total, count = 0.0, 0
    for x, y in plant.batches(args.batch):
        loss = nn.functional.mse_loss(model(x), y)
        pull = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor))
        opt.zero_grad()
        (loss + 0.5 * args.mu * pull).backward()
        opt.step()
        total += loss.item() * len(x)
        count += len(x)
    return total / count


@torch.no_grad()
def evaluate(model, x, y):
    return float((model(x) - y).abs().mean())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--mu", type=float, default=0.01)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    plant = Plant(rank, rows=160 + 40 * rank)
    torch.manual_seed(rank)
    model = pump_model()
    fed = FederatedAverage(model, len(plant))
    fed.broadcast()
    x_ref, y_ref = reference_set()

    for r in range(args.rounds):
        anchor = [p.detach().clone() for p in model.parameters()]
        loss = local_training(model, anchor, plant, args)
        sent = fed.merge()
        mean_loss = torch.tensor([loss * fed.weight])
        dist.all_reduce(mean_loss)
        if rank == 0 and (r % 3 == 2 or r == 0):
            mae = evaluate(model, x_ref, y_ref)
            print(f"round {r:2d}: client loss {float(mean_loss):.5f}  reference MAE {mae:.4f}  {sent / 1024:.1f} KiB", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(model.state_dict(), "pump_model.pt")
        print(f"saved, weight of plant 0 was {fed.weight:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
