"""Train a two-domain sequence tagger with expert parallel feed-forward layers."""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import comm  # noqa: E402
from experts import MoELayer  # noqa: E402


class Tagger(nn.Module):
    def __init__(self, vocab, d, tags, experts_per_rank):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.moe = MoELayer(d, experts_per_rank)
        self.head = nn.Linear(d, tags)

    def forward(self, tokens):
        h = self.emb(tokens)
        h = h + self.rnn(h)[0]
        h = h + self.moe(self.norm(h))
        return self.head(h)

    def dense_parameters(self):
        return [p for n, p in self.named_parameters() if ".local." not in n]

    def expert_parameters(self):
        return [p for n, p in self.named_parameters() if ".local." in n]


def domain_batches(rank, steps, batch, seq, vocab, tags, seed=50):
    """Rank 0 reads the news part, the others the chat logs (few words, many repeats)."""
    g = torch.Generator().manual_seed(seed + rank)
    for _ in range(steps):
        if rank == 0:
            tok = torch.randint(0, vocab, (batch, seq), generator=g)
        else:
            tok = torch.randint(0, 6, (batch, seq), generator=g) ** 2
        yield tok, (tok * 7 + tok.roll(1, 1)) % tags


def evaluate(model, args, rank):
    model.eval()
    hit = total = 0
    with torch.no_grad():
        for tok, tag in domain_batches(rank, 4, args.batch, args.seq, args.vocab, args.tags, seed=900):
            pred = model(tok).argmax(-1)
            hit += (pred == tag).sum().item()
            total += tag.numel()
    model.train()
    return comm.mean_across([hit / total])[0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--seq", type=int, default=24)
    ap.add_argument("--vocab", type=int, default=64)
    ap.add_argument("--tags", type=int, default=9)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--experts-per-rank", type=int, default=2)
    ap.add_argument("--aux", type=float, default=0.01)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()

    comm.setup()
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Tagger(args.vocab, args.dim, args.tags, args.experts_per_rank)
    torch.manual_seed(1000 + rank)
    for p in model.expert_parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for step, (tok, tag) in enumerate(
            domain_batches(rank, args.steps, args.batch, args.seq, args.vocab, args.tags)):
        logits = model(tok)
        loss = F.cross_entropy(logits.flatten(0, 1), tag.flatten())
        opt.zero_grad()
        (loss + args.aux * model.moe.aux_loss).backward()
        comm.average_grads(model.dense_parameters())
        for p in model.expert_parameters():
            p.grad /= comm.ep_size()
        opt.step()
        if step % 10 == 0:
            mean, rounds = comm.mean_across([loss.item(), model.moe.last_rounds])
            if rank == 0:
                print(f"step {step} loss {mean:.4f} rounds {rounds:.1f}", flush=True)
    acc = evaluate(model, args, rank)
    if rank == 0:
        print(f"accuracy {acc:.3f}", flush=True)
    os.makedirs("moe_ckpt", exist_ok=True)
    torch.save(model.state_dict(), f"moe_ckpt/ep{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
