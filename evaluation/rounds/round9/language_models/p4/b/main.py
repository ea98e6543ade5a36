import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from corpus import Curriculum
from moe import MoELayer

VOCAB, DOMAINS, DIM, STEPS = 60, 3, 16, 14


class MoELM(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.moe = MoELayer(DIM, group)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids[:, :-1])
        logits = self.head(self.rnn(self.moe(x))[0])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def init_domains(model):
    """Embeddings of one domain share a direction and the router starts aligned with it."""
    g = torch.Generator().manual_seed(5)
    directions = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0][:DOMAINS]
    with torch.no_grad():
        for d in range(DOMAINS):
            rows = slice(d * VOCAB // DOMAINS, (d + 1) * VOCAB // DOMAINS)
            model.emb.weight[rows] = 2.0 * directions[d] + 0.2 * torch.randn(VOCAB // DOMAINS, DIM, generator=g)
        model.moe.router.weight.copy_(directions)


def sync_shared(model, world):
    for name, p in model.named_parameters():
        if ".expert." in name:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = dist.new_group(list(range(world)))
    torch.manual_seed(0)
    model = MoELM(tokens)
    init_domains(model)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    curriculum = Curriculum(VOCAB, DOMAINS, [(0, [0, 1, 2]), (6, [0, 1])])
    for step in range(STEPS):
        loss = model(curriculum.batch(step, rank, 6, 12))
        opt.zero_grad()
        loss.backward()
        sync_shared(model, world)
        opt.step()
        stats = torch.tensor([loss.item(), float(model.moe.load)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0] / world:.3f} tokens {int(stats[1])}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
