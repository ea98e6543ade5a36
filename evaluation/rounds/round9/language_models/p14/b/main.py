import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from experts import Experts
from gradients import reduce_gradients
from layout import build

VOCAB, DIM, STEPS = 40, 16, 30


class Model(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.experts = Experts(DIM, layout, capacity=64)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        logits = self.head(self.experts(self.emb(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batch(step, rank):
    g = torch.Generator().manual_seed(step * 64 + rank)
    start = torch.randint(VOCAB, (8, 1), generator=g)
    return (start + 7 * torch.arange(11)) % VOCAB


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = build(ep_size=2)
    torch.manual_seed(0)
    model = Model(layout)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step, rank))
        opt.zero_grad()
        loss.backward()
        reduce_gradients(model, layout)
        opt.step()
        if (step + 1) % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
