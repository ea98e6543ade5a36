import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from responses import LENGTH, VOCAB, Responses
from ring import Prefetcher, Ring

STEPS_PER_EPOCH, EPOCHS, SLOTS = 15, 3, 4


class Lm(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(LENGTH, dim)
        self.net = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(h + self.net(h))


def warmup_then_linear(step):
    total = STEPS_PER_EPOCH * EPOCHS
    return min((step + 1) / 5, max(0.05, (total - step) / total))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data = Responses(90, rank, world)
    stream = iter(Prefetcher(Ring(SLOTS, data.buffer), data.fill, data.order()))
    model = DDP(Lm())
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, warmup_then_linear)
    for epoch in range(EPOCHS):
        total = torch.zeros(1)
        for _ in range(STEPS_PER_EPOCH):
            ids, labels = next(stream)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / STEPS_PER_EPOCH:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "sft.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
