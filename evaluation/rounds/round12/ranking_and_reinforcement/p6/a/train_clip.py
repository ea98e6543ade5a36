import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mm.buckets import FlatBuckets
from mm.exchange import swap
from mm.pairs import PairStream
from mm.topology import build_topology
from mm.towers import BUILDERS


class Session:
    def __init__(self, steps=40, batch=12, dim=16, lr=0.3, seed=9):
        self.topo = build_topology()
        torch.manual_seed(seed)
        self.tower = BUILDERS[self.topo.tower](dim)
        self.params = list(self.tower.parameters())
        self.buckets = FlatBuckets(self.params, self.topo.dp_group)
        self.stream = PairStream(self.topo.tower, self.topo.replica, batch, seed)
        self.steps, self.lr = steps, lr

    def step(self):
        mine = self.tower(self.stream.next())
        theirs = swap(mine, self.topo.partner)
        logits = mine @ theirs.t() / 0.2
        loss = F.cross_entropy(logits, torch.arange(len(mine)))
        self.tower.zero_grad()
        loss.backward()
        self.buckets.average()
        with torch.no_grad():
            for p in self.params:
                p -= self.lr * p.grad
        return loss.item()

    def run(self):
        for step in range(1, self.steps + 1):
            loss = self.step()
            if step % 10 == 0 and self.topo.replica == 0:
                print(f"{self.topo.tower}: step {step} loss {loss:.4f}", flush=True)
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    Session(steps=int(os.environ.get("CLIP_STEPS", 40))).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
