import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

import mtl.tasks  # noqa: F401  fills the registry
from mtl.callbacks import RunningLoss, SamplePreview
from mtl.channels import GradChannels
from mtl.registry import TASKS
from mtl.sampler import TaskSampler, seed_everything


class Trainer:
    def __init__(self, args):
        self.rank = dist.get_rank()
        seed_everything(args.seed)
        self.body = nn.Sequential(nn.Linear(8, args.dim), nn.GELU(), nn.Linear(args.dim, args.dim), nn.GELU())
        self.tasks = nn.ModuleDict({n: TASKS[n](args.dim) for n in sorted(TASKS)})
        self.channels = GradChannels(TASKS)
        self.sampler = TaskSampler(TASKS)
        params = list(self.body.parameters()) + list(self.tasks.parameters())
        self.opt = torch.optim.SGD(params, lr=args.lr)
        self.gen = torch.Generator().manual_seed(args.seed * 31 + self.rank)
        self.running = RunningLoss()
        self.callbacks = [self.running, SamplePreview(args.preview_every)]
        self.batch = args.batch

    def step(self, step):
        name = self.sampler.next()
        task = self.tasks[name]
        x = torch.randn(self.batch, 8, generator=self.gen)
        y = task.make_labels(x, self.gen)
        loss = task.loss(self.body(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.channels.reduce(name, list(self.body.parameters()) + list(task.parameters()))
        self.opt.step()
        for cb in self.callbacks:
            cb.after_step(self, step, name, (x, y), loss.item())

    def fit(self, steps):
        for step in range(1, steps + 1):
            self.step(step)
        dist.barrier()
        if self.rank == 0:
            for name, value in sorted(self.running.value.items()):
                print(f"{name}: {value:.4f} ({self.channels.bytes[name]} bytes)", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--preview-every", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).fit(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
