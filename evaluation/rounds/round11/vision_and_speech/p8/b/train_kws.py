import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from corpus import BANDS, FRAMES, WORDS, keyword_batch
from curriculum import NoiseCurriculum


class Spotter(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.register_buffer("mean", torch.zeros(BANDS))
        self.register_buffer("std", torch.ones(BANDS))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(FRAMES * BANDS, dim), nn.ReLU(), nn.Linear(dim, WORDS))

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


class Trainer:
    def __init__(self, args, folder):
        self.args, self.path = args, os.path.join(folder, "last.pt")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(13)
        self.core = Spotter()
        self.opt = torch.optim.SGD(self.core.parameters(), lr=0.05, momentum=0.9)
        self.curriculum = NoiseCurriculum()
        self.step = 0
        self.restore()
        self.model = DDP(self.core)

    def save(self):
        if self.rank == 0:
            torch.save({"model": self.core.state_dict(), "opt": self.opt.state_dict(), "step": self.step,
                        "curriculum": self.curriculum.state_dict()}, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def restore(self):
        """Only rank 0 reads the (possibly node-local) file, the others get it over the wire."""
        box = [None]
        if self.rank == 0 and os.path.exists(self.path):
            box = [torch.load(self.path)]
            self.curriculum.load_state_dict(box[0].pop("curriculum"))
        dist.broadcast_object_list(box, src=0)
        state = box[0]
        if state is not None:
            self.core.load_state_dict(state["model"])
            self.opt.load_state_dict(state["opt"])
            self.step = state["step"]

    def refresh_cmvn(self):
        """Mean and deviation of each band at the current noise level, over all ranks."""
        x, _ = keyword_batch(100_000 + self.curriculum.level, self.rank, 64, self.curriculum.noise)
        flat = x.reshape(-1, BANDS)
        parts = [None] * self.world
        dist.all_gather_object(parts, (flat.mean(0), flat.var(0)))
        self.core.mean.copy_(torch.stack([p[0] for p in parts]).mean(0))
        self.core.std.copy_(torch.stack([p[1] for p in parts]).mean(0).sqrt())

    def run(self, until):
        while self.step < until:
            x, y = keyword_batch(self.step, self.rank, self.args.batch_size, self.curriculum.noise)
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if self.curriculum.observe(mean.item() / self.world):
                self.refresh_cmvn()
            if self.step % 10 == 0 and self.rank == 0:
                print(f"step {self.step} loss {mean.item() / self.world:.3f} noise {self.curriculum.noise}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=56)
    p.add_argument("--requeue-every", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=16)
    args = p.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="kws_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    done = 0
    while done < args.steps:
        trainer = Trainer(args, folder[0])
        trainer.run(min(args.steps, trainer.step + args.requeue_every))
        trainer.save()
        done = trainer.step
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
