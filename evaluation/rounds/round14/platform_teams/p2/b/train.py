import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from comm import average_grads
from curriculum import Curriculum
from moe import TinySwitch


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--rows", type=int, default=4)
    ap.add_argument("--vocab", type=int, default=64)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--depth", type=int, default=2)
    ap.add_argument("--lr", type=float, default=5e-3)
    return ap.parse_args()


def report(step, loss, model):
    mean = loss.detach().clone()
    load = torch.stack([layer.load for layer in model.layers])
    dist.all_reduce(mean)
    dist.all_reduce(load)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.4f} load {load.tolist()}", flush=True)
    for layer in model.layers:
        layer.load.zero_()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = TinySwitch(args.vocab, args.dim, args.depth)
    shared, local = model.split_parameters()
    opt = torch.optim.Adam(shared + local, lr=args.lr)
    course = Curriculum(args.vocab)
    for step, tokens, targets in course.batches(args.rows, args.steps, seed=100 + dist.get_rank()):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        opt.zero_grad()
        loss.backward()
        average_grads(shared)
        for p in local:
            if p.grad is not None:
                p.grad /= dist.get_world_size()
        opt.step()
        if (step + 1) % 10 == 0:
            report(step + 1, loss, model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
