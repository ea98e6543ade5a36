import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gnn.graph import community_graph, trim
from gnn.model import Sage
from gnn.partition import make_part


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, default=180)
    ap.add_argument("--max-in-degree", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    edges, feat, label = community_graph(args.nodes, 6, 0.25, 0.002, args.seed)
    edges = trim(edges, args.max_in_degree, seed=args.seed)
    part = make_part(edges, args.nodes, rank, world)
    x = torch.from_numpy(feat[part.owned])
    y = torch.from_numpy(label[part.owned])
    torch.manual_seed(args.seed)
    model = Sage([12, 24, 6], part, args.nodes)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)
    for epoch in range(args.epochs):
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        average_gradients(model)
        opt.step()
        if epoch % 10 == 9:
            stat = torch.tensor([(out.argmax(1) == y).sum().item(), len(y), loss.item() * len(y)])
            dist.all_reduce(stat)
            if rank == 0:
                print(f"epoch {epoch + 1} loss {stat[2] / stat[1]:.4f} acc {stat[0] / stat[1]:.3f} "
                      f"fetches {[l.halo.fetches for l in model.layers]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
