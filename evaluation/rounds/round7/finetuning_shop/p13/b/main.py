import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from journal import Journal, NoJournal
from mixer import Mixer, default_store
from sources import STRIDE, VOCAB, draw, held_out

EPOCHS, STEPS, BATCH = 4, 8, 12


class Lm(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def per_source(model):
    return {name: loss_of(model.module, held_out(name)).item() for name in sorted(STRIDE)}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    mixer = Mixer(sorted(STRIDE), default_store(), rank)
    journal = Journal("journal.jsonl", mixer) if rank == world - 1 else NoJournal()
    model = DDP(Lm())
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(EPOCHS):
        shares = mixer.update(per_source(model))
        total = 0.0
        for step in range(STEPS):
            ids = draw(shares, BATCH, seed=(epoch * STEPS + step) * world + rank)
            loss = loss_of(model, ids)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        journal.write(epoch, total / STEPS)
        if rank == 0:
            text = ", ".join(f"{k} {v:.2f}" for k, v in shares.items())
            print(f"epoch {epoch} loss {total / STEPS:.3f} shares {text}", flush=True)
            torch.save(model.module.state_dict(), "latest.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
