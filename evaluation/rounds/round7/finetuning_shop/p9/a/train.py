import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from blend import LENGTH, VOCAB, Blend
from topology import Topology


class Lm(nn.Module):
    def __init__(self, dim=36):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.zeros(LENGTH, dim))
        self.att = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        n = ids.shape[1]
        h = self.tok(ids) + self.pos[:n]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        a, _ = self.att(h, h, h, attn_mask=mask, need_weights=False)
        h = h + a
        return self.head(h + self.mlp(h))


def main():
    with open("recipe.json") as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    topo = Topology.from_env(cfg["tensor_parallel"])
    torch.manual_seed(0)
    blend = Blend(cfg["sources"], cfg["samples_per_epoch"])
    model = DDP(Lm())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"] * topo.data_parallel ** 0.5)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)

    for epoch in range(cfg["epochs"]):
        stats = torch.zeros(2 + len(blend.sources))
        for ids, part in blend.batches(epoch, cfg["batch_size"], topo):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats[0] += loss.item() * len(part)
            stats[1] += len(part)
            for s, _ in part:
                stats[2 + s] += 1
        sched.step()
        dist.all_reduce(stats)
        if topo.is_main:
            share = (stats[2:] / stats[1]).tolist()
            print(f"epoch {epoch} loss {stats[0] / stats[1]:.3f} samples {int(stats[1])} "
                  f"blend {[round(v, 2) for v in share]}", flush=True)
    if topo.is_main:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
