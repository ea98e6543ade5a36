import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from banner import describe
from curriculum import LengthCurriculum

VOCAB = 48


class TinyLM(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, dim, 3)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = F.pad(self.emb(ids[:, :-1]).transpose(1, 2), (2, 0))
        x = self.conv(x).transpose(1, 2)
        logits = self.head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def sample(n, length, generator):
    start = torch.randint(VOCAB, (n, 1), generator=generator)
    return (start + torch.randint(1, 3, (n, 1), generator=generator) * torch.arange(length)) % VOCAB


@torch.no_grad()
def validate(model, length):
    model.eval()
    g = torch.Generator().manual_seed(77 + dist.get_rank())
    loss = model(sample(8, length, g)).clone()
    dist.all_reduce(loss)
    model.train()
    return loss.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--dim", type=int, default=24)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = TinyLM(args.dim)
    fully_shard(model.mlp)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curriculum = LengthCurriculum([8, 16, 24], target=3.7)
    describe(model, curriculum, verbose_rank=world - 1)

    g = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        loss = model(sample(8, curriculum.length, g))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % args.eval_every == 0:
            val = validate(model, curriculum.length)
            curriculum.update(val)
            if rank == world - 1:
                print(f"step {step} val {val:.3f} next length {curriculum.length}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
