import logging

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mining import Corpus, load_index
from settings import parse


class Triples(Dataset):
    def __init__(self, corpus, negatives):
        self.corpus, self.negatives = corpus, negatives

    def __len__(self):
        return len(self.corpus.query)

    def __getitem__(self, i):
        docs = np.concatenate([[self.corpus.positive[i]], self.negatives[i]])
        return self.corpus.query[i], self.corpus.doc[docs]


class DualEncoder(nn.Module):
    def __init__(self, teacher_dim, dim):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(teacher_dim, 64), nn.Tanh(), nn.Linear(64, dim))
        self.d = nn.Sequential(nn.Linear(teacher_dim, 64), nn.Tanh(), nn.Linear(64, dim))

    def forward(self, query, docs):
        q, d = F.normalize(self.q(query), dim=-1), F.normalize(self.d(docs), dim=-1)
        return torch.einsum("bd,bkd->bk", q, d)


def distill_loss(student, query, docs, temperature=0.07, alpha=0.5):
    teacher = torch.einsum("bd,bkd->bk", F.normalize(query, dim=-1), F.normalize(docs, dim=-1))
    kl = F.kl_div((student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="batchmean")
    ce = F.cross_entropy(student / temperature, torch.zeros(len(query), dtype=torch.long))
    return alpha * kl + (1 - alpha) * ce


def setup():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    s = parse(rank, dist.get_world_size())
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(name)s: %(message)s")
    torch.manual_seed(s.seed + rank)
    return s


def main():
    s = setup()
    corpus = Corpus(s)
    data = Triples(corpus, load_index(corpus, s))
    sampler = DistributedSampler(data, shuffle=True, seed=s.seed)
    loader = DataLoader(data, s.batch, sampler=sampler)
    model = DDP(DualEncoder(s.teacher_dim, s.dim))
    opt = torch.optim.Adam(model.parameters(), lr=s.lr)
    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for query, docs in loader:
            score = model(query, docs)
            loss = distill_loss(score, query, docs)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits = (score.argmax(-1) == 0).float().sum().item()
            stats += torch.tensor([loss.item() * len(query), hits, len(query)])
        dist.all_reduce(stats)
        if s.rank == 0:
            logging.info("epoch %d loss %.4f hit rate %.3f", epoch, stats[0] / stats[2], stats[1] / stats[2])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
