import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from retrieval.corpus import Corpus, QueryStream
from retrieval.index import NegativeIndex
from retrieval.optim import Adagrad

CONFIG = dict(docs=160, dim=12, topics=8, batch=8, session=5, refresh=10, negatives=4, steps=50, lr=0.05, seed=17)


class Encoder(nn.Module):
    def __init__(self, dim, out=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def train_step(model, encoder, corpus, index, opt, cfg, step, topic, query, pos):
    with torch.no_grad():
        probe = encoder(query)
    neg = index.hard_negatives(step, topic, probe, pos, cfg["negatives"])
    x = torch.cat([query, corpus.feat[pos], corpus.feat[neg.flatten()]])
    q, p, n = model(x).split([len(query), len(query), neg.numel()])
    n = n.view(len(query), cfg["negatives"], -1)
    logits = torch.cat([(q * p).sum(1, keepdim=True), torch.einsum("bd,bkd->bk", q, n)], 1) / 0.1
    loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def main():
    cfg = CONFIG
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg["seed"])
    corpus = Corpus(cfg["docs"], cfg["dim"], cfg["topics"], cfg["seed"])
    encoder = Encoder(cfg["dim"])
    model = DDP(encoder)
    opt = Adagrad(model.parameters(), cfg["lr"])
    index = NegativeIndex(encoder, corpus, cfg["refresh"])
    stream = QueryStream(corpus, cfg["batch"], cfg["session"], cfg["seed"] + rank)
    for step, topic, query, pos in stream:
        if step == cfg["steps"]:
            break
        loss = train_step(model, encoder, corpus, index, opt, cfg, step, topic, query, pos)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss:.4f} index hits {index.cache.hits} misses {index.cache.misses}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
