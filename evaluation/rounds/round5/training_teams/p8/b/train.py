import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lm.model import CharLM
from lm.sampler import TokenBatchSampler
from lm.text import Corpus, preview

SEED = 12
EPOCHS = 5
MAX_TOKENS = 240


def collate(rows):
    return pad_sequence([torch.tensor(r) for r in rows], batch_first=True)


def perplexity(model, corpus, rank, world):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for i in range(rank, len(corpus), world):
            ids = torch.tensor([corpus.ids[i]])
            out = model(ids[:, :-1])
            total[0] += F.cross_entropy(out[0], ids[0, 1:], reduction="sum")
            total[1] += ids.shape[1] - 1
    dist.all_reduce(total)
    model.train()
    return torch.exp(total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(SEED)
    torch.manual_seed(SEED)
    corpus, heldout = Corpus(300, seed=1), Corpus(24, seed=2)
    if rank == 0:
        print(f"{len(corpus)} documents, {sum(corpus.lengths())} tokens", flush=True)
        preview(corpus)

    model = DDP(CharLM())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = TokenBatchSampler(corpus.lengths(), MAX_TOKENS, rank, world)
    loader = DataLoader(corpus.ids, batch_sampler=sampler, collate_fn=collate)

    for epoch in range(EPOCHS):
        for ids in loader:
            out = model(ids[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        ppl = perplexity(model.module, heldout, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: {sampler.epoch_batches} batches, perplexity {ppl:.3f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
