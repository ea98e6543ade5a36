"""Train the first-stage ranker: sharded tables, replicated MLP on top."""
import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from recstack.data import NUM_DENSE, ClickLog
from recstack.embedding import EmbeddingCollection
from recstack.optim import RowwiseAdagrad

log = logging.getLogger("ranker")

EPOCHS = 3
BATCH = 48
TRAIN_ROWS = 1440
VALID_ROWS = 480
SEED = 2045
PATIENCE = 1


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = EmbeddingCollection()
        self.over = nn.Sequential(
            nn.Linear(self.embeddings.out_dim + NUM_DENSE, 64), nn.ReLU(),
            nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, batch):
        emb = self.embeddings(batch.sparse, batch.dense.size(0))
        return self.over(torch.cat([emb, batch.dense], dim=1)).squeeze(1)


def average_gradients(params, world):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def auc(score, label):
    order = torch.argsort(score)
    ranks = torch.empty_like(score)
    ranks[order] = torch.arange(1, score.numel() + 1, dtype=score.dtype)
    pos = label > 0.5
    n_pos, n_neg = int(pos.sum()), int((~pos).sum())
    if n_pos == 0 or n_neg == 0:
        return 0.5
    return float((ranks[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


@torch.no_grad()
def validate(model, data, rank, world):
    """Lookups need everyone; the metric itself is computed by rank 0."""
    pairs = torch.cat([torch.stack([model(b), b.label]) for b in data.batches(shuffle=False)], dim=1)
    parts = [torch.empty_like(pairs) for _ in range(world)] if rank == 0 else None
    dist.gather(pairs, parts, dst=0)
    if rank == 0:
        score, label = torch.cat(parts, dim=1)
        return auc(score, label)
    return None


def save_shard(model, folder, rank):
    tables = {k: v for k, v in model.state_dict().items() if k.startswith("embeddings.")}
    torch.save(tables, os.path.join(folder, f"tables.{rank}.pt"))
    if rank == 0:
        torch.save(model.over.state_dict(), os.path.join(folder, "over.pt"))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)

    torch.manual_seed(SEED)
    model = Ranker()
    dense_params = list(model.over.parameters())
    for p in dense_params:
        dist.broadcast(p.data, src=0)
    opt_dense = RowwiseAdagrad(dense_params, lr=0.02, rowwise=False)
    opt_sparse = RowwiseAdagrad(model.embeddings.parameters(), lr=0.03, rowwise=True)

    train = ClickLog(TRAIN_ROWS, BATCH, SEED, rank)
    valid = ClickLog(VALID_ROWS, BATCH, SEED, rank + 100)

    best, bad = 0.0, 0
    with tempfile.TemporaryDirectory(prefix="ranker_") as folder:
        for epoch in range(EPOCHS):
            total = 0.0
            for batch in train.batches():
                loss = F.binary_cross_entropy_with_logits(model(batch), batch.label)
                opt_dense.zero_grad()
                opt_sparse.zero_grad()
                loss.backward()
                average_gradients(dense_params, world)
                opt_dense.step()
                opt_sparse.step()
                total += loss.item()

            score = validate(model, valid, rank, world)
            verdict = torch.zeros(2)
            if rank == 0:
                if score > best:
                    best, bad = score, 0
                else:
                    bad += 1
                verdict = torch.tensor([float(bad == 0), float(bad >= PATIENCE)])
                log.info("epoch %d loss %.4f auc %.4f", epoch, total / len(train), score)
            dist.broadcast(verdict, src=0)
            if verdict[0]:
                save_shard(model, folder, rank)
            if verdict[1]:
                break
        dist.barrier()
    log.info("best auc %.4f", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
