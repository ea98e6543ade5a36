"""Deep ensemble for retention-time regression. Members train alone, one on each
rank; predictions and stacking weights travel through a store held by rank 0."""
import argparse
import datetime
import io

import torch
import torch.distributed as dist
import torch.nn as nn


def pack(t):
    buf = io.BytesIO()
    torch.save(t, buf)
    return buf.getvalue()


def unpack(raw):
    return torch.load(io.BytesIO(raw))


def connect(rank, world):
    limit = datetime.timedelta(minutes=20)
    box = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        box[0] = store.port
    dist.broadcast_object_list(box, src=0)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", box[0], None, False, limit, wait_for_workers=False)
    dist.destroy_process_group()
    return store


def molecules(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=gen)
    y = x[:, :3].sum(1) + torch.sin(2 * x[:, 3]) + 0.1 * torch.randn(n, generator=gen)
    return x, y


def train_member(args, rank):
    torch.manual_seed(args.seed + rank)
    x, y = molecules(400, args.seed)
    pick = torch.randint(0, len(x), (len(x),))
    net = nn.Sequential(nn.Linear(10, 16 + 8 * rank), nn.ReLU(), nn.Linear(16 + 8 * rank, 1))
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        for idx in pick.split(50):
            loss = (net(x[idx]).squeeze(1) - y[idx]).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net


def stack(preds, y):
    """Least squares weights of the members, kept positive."""
    a = preds.T
    w = torch.linalg.solve(a.T @ a + 1e-2 * torch.eye(a.shape[1]), a.T @ y)
    w = w.clamp(min=0)
    return w / w.sum()


@torch.no_grad()
def calibrate(net, weight, args, rank):
    """Bootstrap spread of one member's residuals."""
    x, y = molecules(200, args.seed + 1)
    res = y - net(x).squeeze(1)
    gen = torch.Generator().manual_seed(rank)
    draws = args.bootstraps * (1 + 4 * rank)
    spread = torch.stack([res[torch.randint(0, len(res), (len(res),), generator=gen)].std() for _ in range(draws)])
    return weight * spread.mean()


def report(store, rank, world, sigma):
    """The last member has the most to do and writes the summary."""
    store.set(f"sigma/{rank}", pack(sigma))
    if rank == world - 1:
        sigmas = torch.stack([unpack(store.get(f"sigma/{r}")) for r in range(world)])
        print("ensemble sigma", round(sigmas.norm().item(), 4), flush=True)
        store.set("summary", pack(sigmas))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--bootstraps", type=int, default=5000)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=8)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = connect(rank, world)
    net = train_member(args, rank)
    x, y = molecules(200, args.seed + 1)
    with torch.no_grad():
        store.set(f"pred/{rank}", pack(net(x).squeeze(1)))
    if rank == 0:
        preds = torch.stack([unpack(store.get(f"pred/{r}")) for r in range(world)])
        weights = stack(preds, y)
        print("weights", [round(v, 3) for v in weights.tolist()], flush=True)
        store.set("weights", pack(weights))
    weights = unpack(store.get("weights"))
    sigma = calibrate(net, weights[rank], args, rank)
    report(store, rank, world, sigma)
    print(f"member {rank} finished", flush=True)


if __name__ == "__main__":
    main()
