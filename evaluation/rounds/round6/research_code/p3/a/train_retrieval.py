"""Two-tower retrieval with in-batch negatives from all ranks."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PairCorpus(Dataset):
    """Query / passage token bags; a passage repeats part of its query's words."""

    def __init__(self, n, vocab, length, seed):
        gen = torch.Generator().manual_seed(seed)
        topic = torch.randint(1, vocab, (n, 6), generator=gen)
        self.query = topic[:, torch.randperm(6, generator=gen)[:4]]
        filler = torch.randint(1, vocab, (n, length - 4), generator=gen)
        self.passage = torch.cat([topic[:, 1:5], filler], 1)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return self.query[i], self.passage[i]


class Tower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens):
        return F.normalize(self.proj(self.emb(tokens)), dim=-1)


class DualEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.q = Tower(vocab, dim)
        self.p = Tower(vocab, dim)

    def forward(self, query, passage):
        return self.q(query), self.p(passage)


def gather_with_grad(x):
    return torch.cat(distF.all_gather(x), 0)


def in_batch_targets(n, offset=0, device=None):
    return torch.arange(n, device=device) + offset


def contrastive_loss(q, p, temperature):
    all_p = gather_with_grad(p)
    logits = q @ all_p.t() / temperature
    target = in_batch_targets(q.shape[0], offset=dist.get_rank() * q.shape[0], device=q.device)
    return F.cross_entropy(logits, target)


@torch.no_grad()
def recall_at(model, data, ks, limit):
    """Rank 0 searches all passages for the queries of the held-out part."""
    q, p = model(data.query[:limit], data.passage[:limit])
    order = (q @ p.t()).argsort(dim=1, descending=True)
    gold = torch.arange(limit)[:, None]
    return {k: (order[:, :k] == gold).any(1).float().mean().item() for k in ks}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--vocab", type=int, default=400)
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--temperature", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    corpus = PairCorpus(960, args.vocab, 12, seed=args.seed)
    heldout = PairCorpus(200, args.vocab, 12, seed=args.seed + 1)
    sampler = DistributedSampler(corpus, seed=args.seed, drop_last=True)
    loader = DataLoader(corpus, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(DualEncoder(args.vocab, args.dim))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for query, passage in loader:
            q, p = model(query, passage)
            loss = contrastive_loss(q, p, args.temperature)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            rec = recall_at(model.module, heldout, (1, 10), 200)
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} recall@1 {rec[1]:.3f} recall@10 {rec[10]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
