import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def build_model(dim):
    return nn.Sequential(nn.Linear(dim, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 3))


class OuterOptimizer:
    """Nesterov SGD on the pseudo-gradient (anchor - current), over the outer group."""

    def __init__(self, model, topo, lr, momentum):
        self.model, self.topo = model, topo
        self.lr, self.momentum = lr, momentum
        self.anchor = parameters_to_vector(model.parameters()).detach().clone()
        self.velocity = torch.zeros_like(self.anchor)
        self.rounds = 0

    @torch.no_grad()
    def step(self):
        delta = self.anchor - parameters_to_vector(self.model.parameters())
        dist.all_reduce(delta, group=self.topo.outer)
        delta /= self.topo.n_islands
        self.velocity.mul_(self.momentum).add_(delta)
        self.anchor.sub_(self.lr * (delta + self.momentum * self.velocity))
        vector_to_parameters(self.anchor.clone(), self.model.parameters())
        self.rounds += 1


class IslandTrainer:
    def __init__(self, args, topo, stream):
        self.args, self.topo, self.stream = args, topo, stream
        torch.manual_seed(args.seed)
        self.model = build_model(stream.dim)
        self.inner_opt = torch.optim.AdamW(self.model.parameters(), lr=args.inner_lr)
        self.outer_opt = OuterOptimizer(self.model, topo, args.outer_lr, args.outer_momentum)
        self.loss_avg = None
        self.since_outer = 0
        self.skipped = 0
        self.history = []

    def say(self, msg):
        if self.topo.slot == 0:
            print(f"[island {self.topo.island}] {msg}", flush=True)

    def reduce_island(self, tensor):
        dist.all_reduce(tensor, group=self.topo.inner)
        return tensor.div_(dist.get_world_size(self.topo.inner))

    def is_spike(self, loss):
        """Loss of the whole island against its running mean."""
        mean = self.reduce_island(loss.detach().clone()).item()
        if self.loss_avg is not None and mean > self.args.spike_factor * self.loss_avg:
            return True
        self.loss_avg = mean if self.loss_avg is None else 0.95 * self.loss_avg + 0.05 * mean
        return False

    def inner_step(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        self.inner_opt.zero_grad()
        if self.is_spike(loss):
            self.skipped += 1
            return None
        loss.backward()
        grads = parameters_to_vector([p.grad for p in self.model.parameters()])
        self.reduce_island(grads)
        vector_to_parameters(grads, [p.grad for p in self.model.parameters()])
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner_opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        x, y = self.stream.validation_shard(self.topo.rank, self.topo.world)
        acc = torch.tensor([F.mse_loss(self.model(x), y, reduction="sum").item(), float(y.numel())],
                           dtype=torch.float64)
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    def fit(self):
        a, t0 = self.args, time.time()
        batches = self.stream.batches()
        for step in range(1, a.total_steps + 1):
            loss = self.inner_step(*next(batches))
            if loss is not None:
                self.since_outer += 1
            if self.since_outer == a.inner_steps:
                self.outer_opt.step()
                self.since_outer = 0
                shown = "skipped" if loss is None else f"{loss:.4f}"
                self.say(f"step {step} round {self.outer_opt.rounds} loss {shown}")
            if step % a.eval_every == 0:
                val = self.evaluate()
                self.history.append({"step": step, "val": val, "skipped": self.skipped,
                                     "elapsed": round(time.time() - t0, 2)})
                self.say(f"step {step} val {val:.4f} skipped {self.skipped}")
        return self.history
