"""Domain-decomposed training of a small neural operator for a 2-D heat step."""
import argparse

import torch
import torch.distributed as dist

from operator_lib.data import HeatPairs
from operator_lib.halo import Exchanger
from operator_lib.net import HaloOperator
from operator_lib.topology import GridTopology


def average_grads(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def evaluate(net, data, steps):
    err = torch.zeros(2)
    with torch.no_grad():
        for k in range(steps):
            x, y = data.pair(1000 + k)
            err += torch.tensor([(net(x) - y).pow(2).sum().item(), y.pow(2).sum().item()])
    dist.all_reduce(err)
    return (err[0] / err[1]).sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=3)
    ap.add_argument("--cols", type=int, default=1)
    ap.add_argument("--n", type=int, default=36, help="global grid size")
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--eval-every", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    topo = GridTopology(args.rows, args.cols, dist.get_rank())
    torch.manual_seed(0)
    net = HaloOperator(channels=8, depth=3, exchange=Exchanger(topo, width=1))
    data = HeatPairs(args.n, topo)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        x, y = data.pair(step)
        loss = (net(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_grads(net)
        opt.step()
        if step % args.eval_every == 0:
            rel = evaluate(net, data, 4)
            if topo.rank == 0:
                print(f"step {step} loss {loss.item():.5f} relative error {rel:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
