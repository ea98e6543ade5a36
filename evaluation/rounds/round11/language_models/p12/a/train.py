"""DDP pretraining of a sparse language model on shards from different domains."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from sparse import SparseMLP

VOCAB, BLOCK, BATCH, DIM, STEPS = 60, 12, 6, 24, 40


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.mlp = SparseMLP(DIM)

    def forward(self, x):
        x = x + self.rnn(self.n1(x))[0]
        return x + self.mlp(self.n2(x))


class SparseLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def rebalance(self):
        return [layer.mlp.router.rebalance() for layer in self.layers]


def domain_rows(gen, rank, world):
    """Most rows come from the domain of the rank, the rest from anywhere."""
    width = VOCAB // world
    home = torch.rand(BATCH, 1, generator=gen) < 0.8
    domain = torch.where(home, rank, torch.randint(0, world, (BATCH, 1), generator=gen))
    start = torch.randint(0, width, (BATCH, 1), generator=gen)
    stride = 1 + torch.randint(0, 3, (BATCH, 1), generator=gen)
    return domain * width + (start + stride * torch.arange(BLOCK + 1)) % width


def setup():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    net = SparseLM()
    return net, dist.get_rank(), dist.get_world_size()


def main():
    net, rank, world = setup()
    model = DDP(net, forward_sync_buffers=False)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    gen = torch.Generator().manual_seed(1200 + rank)
    for step in range(1, STEPS + 1):
        rows = domain_rows(gen, rank, world)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        peaks = net.rebalance()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.3f} peak load {max(peaks):.2f}", flush=True)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
