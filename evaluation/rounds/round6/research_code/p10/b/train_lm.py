import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from evalkit.runner import evaluate


class TinyLM(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h = self.emb(tokens).transpose(1, 2)
        h = self.conv(F.pad(h, (2, 0))).relu()
        return self.out(h.transpose(1, 2))


def markov(vocab, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.softmax(3.0 * torch.randn(vocab, vocab, generator=gen), -1)


def sample(chain, length, gen):
    token = torch.randint(len(chain), (1,), generator=gen)
    out = [token]
    for _ in range(length - 1):
        token = torch.multinomial(chain[token[0]], 1, generator=gen)
        out.append(token)
    return torch.cat(out)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--eval-every", type=int, default=30)
    ap.add_argument("--eval-docs", type=int, default=9)
    ap.add_argument("--vocab", type=int, default=20)
    ap.add_argument("--window", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    chain = markov(args.vocab, 3)
    gen = torch.Generator().manual_seed(50)
    docs = {f"doc{i:03d}": sample(chain, int(torch.randint(30, 90, (1,), generator=gen)), gen)
            for i in range(args.eval_docs)}
    stream = sample(chain, 1500, torch.Generator().manual_seed(60 + rank))
    torch.manual_seed(1)
    net = TinyLM(args.vocab, 24)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pick = torch.Generator().manual_seed(70 + rank)
    for step in range(1, args.steps + 1):
        at = torch.randint(0, len(stream) - 17, (16,), generator=pick)
        batch = torch.stack([stream[a:a + 17] for a in at.tolist()])
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.eval_every == 0:
            ppl, per_doc = evaluate(net, docs, rank, world, args.window)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} ppl {ppl:.3f} "
                      f"docs {len(per_doc)} worst {per_doc.max():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
