"""Bi-encoder with mined hard negatives.

    torchrun --standalone --nproc-per-node=2 train_biencoder.py
"""
import shutil
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ann.corpus import Corpus
from ann.model import BiEncoder, contrastive_loss
from ann.refresher import IndexRefresher

STEPS = 200
BATCH = 32
REFRESH_EVERY = 50   # a new index starts building every so many steps ...
LAG = 20             # ... and is picked up this many steps later
EVAL_EVERY = 50


def shared_folder(rank):
    box = [tempfile.mkdtemp(prefix="biencoder_") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def pick_negatives(rng, negatives, ids, n_docs):
    if negatives is None:  # before the first index: random ones
        return rng.integers(n_docs, size=len(ids))
    column = rng.integers(negatives.shape[1], size=len(ids))
    return negatives[ids, column]


@torch.no_grad()
def mrr(model, corpus):
    model.eval()
    docs = model.encode_docs(corpus.doc_tokens(np.arange(len(corpus.docs))))
    held_out = np.arange(corpus.n_train, len(corpus.queries))
    scores = model.encode_queries(corpus.query_tokens(held_out)) @ docs.T
    gold = torch.from_numpy(corpus.gold[held_out])
    own = scores.gather(1, gold[:, None])
    rank_of_gold = (scores > own).sum(1) + 1
    model.train()
    return (1.0 / rank_of_gold.float()).mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    corpus = Corpus(seed=3)
    model = DDP(BiEncoder(corpus.vocab))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    folder = shared_folder(rank)
    refresher = IndexRefresher(corpus, folder, rank)

    rng = np.random.default_rng([17, rank])
    mine = np.arange(rank, corpus.n_train, world)
    negatives, history, t0 = None, [], time.time()

    for step in range(STEPS):
        version, phase = divmod(step, REFRESH_EVERY)
        if phase == 0:
            refresher.launch(version, model.module)
        if phase == LAG:
            negatives = refresher.fetch(version)

        ids = rng.choice(mine, BATCH, replace=False)
        hard = pick_negatives(rng, negatives, ids, len(corpus.docs))
        doc_ids = np.concatenate([corpus.gold[ids], hard])
        q, d = model(corpus.query_tokens(ids), corpus.doc_tokens(doc_ids))
        loss = contrastive_loss(q, d, BATCH)
        opt.zero_grad()
        loss.backward()
        opt.step()

        if (step + 1) % EVAL_EVERY == 0:
            result = torch.tensor([mrr(model.module, corpus) if rank == 0 else 0.0])
            dist.broadcast(result, src=0)
            history.append(result.item())
            if rank == 0:
                print(f"[{time.time() - t0:5.1f}s] step {step + 1} loss {loss.item():.3f} mrr {history[-1]:.3f}", flush=True)
            if len(history) > 2 and max(history[-2:]) < max(history[:-2]) - 0.1:
                break  # clearly over the hill, and everyone sees the same numbers

    refresher.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
