import json
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from minifw import Runner, build_hooks


class TinyLM(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def corpus(cfg, n, seed, jitter):
    """Cyclic sentences with some random tokens."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, cfg["vocab"], (n, 1), generator=g)
    stride = torch.randint(1, 3, (n, 1), generator=g)
    ids = (start + stride * torch.arange(cfg["seq_len"])) % cfg["vocab"]
    rnd = torch.randint(0, cfg["vocab"], ids.shape, generator=g)
    return torch.where(torch.rand(ids.shape, generator=g) < jitter, rnd, ids)


def main():
    cfg = json.load(open(sys.argv[1] if len(sys.argv) > 1 else "conf/lm.json"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg["seed"])
    model = DDP(TinyLM(cfg["vocab"], cfg["width"]))
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])

    train = corpus(cfg, 320, cfg["seed"], 0.05)[rank::world].split(cfg["batch"])
    val = corpus(cfg, 96, cfg["seed"] + 1, 0.02 + 0.08 * rank).chunk(world)[rank].split(cfg["batch"])

    runner = Runner(model, opt, build_hooks(cfg["hooks"]), rank, cfg["eval_interval"])
    runner.fit(train, val, cfg["max_steps"])
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": runner.step}, "lm.pt")
        print("done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
