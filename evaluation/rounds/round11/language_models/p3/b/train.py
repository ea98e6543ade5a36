"""Tokenizer training followed by language-model training on the same corpus."""
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from lm.bpe import BPE
from lm.corpus import ALPHABET, TokenBlocks, make_corpus, shard

MERGES, BLOCK, BATCH, EPOCHS = 60, 16, 4, 2
PADDED_VOCAB = 96


class ConvLM(nn.Module):
    """Causal convolutional language model."""

    def __init__(self, vocab, dim=32, depth=3, width=3):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)
        self.width = width

    def forward(self, ids):
        x = self.tok(ids)
        for conv, norm in zip(self.convs, self.norms):
            h = F.pad(norm(x).transpose(1, 2), (self.width - 1, 0))
            x = x + F.gelu(conv(h)).transpose(1, 2)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    docs = make_corpus(72, seed=6)
    tokenizer = BPE().train(shard(docs, rank, world), MERGES, ALPHABET)
    blocks = TokenBlocks(tokenizer, docs, BLOCK, BATCH, rank, world)
    if rank == 0:
        print(f"vocab {len(tokenizer.vocab)} tokens {len(blocks.stream)} steps {len(blocks)}", flush=True)

    torch.manual_seed(0)
    model = DDP(ConvLM(PADDED_VOCAB))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    total_steps = EPOCHS * len(blocks)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total_steps)))
    )
    for epoch in range(EPOCHS):
        seen = torch.zeros(2)
        for rows in blocks:
            ids = torch.tensor(rows)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            seen += torch.tensor([loss.item(), 1.0])
        report = [None] * world
        dist.all_gather_object(report, {"loss": seen[0].item(), "steps": int(seen[1])})
        if rank == 0:
            mean = sum(r["loss"] for r in report) / sum(r["steps"] for r in report)
            print(f"epoch {epoch} loss {mean:.3f}", flush=True)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
