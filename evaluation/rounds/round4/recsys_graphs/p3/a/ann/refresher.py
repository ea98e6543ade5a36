"""Asynchronous index refresh (ANCE style).

Rank 0 re-encodes the corpus with a snapshot of the model while training goes on
and leaves the mined negatives in a file; the path is announced through the store.
"""
import copy
import os
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
import torch.distributed as dist

ENCODE_CHUNKS = 8
NEGATIVES = 12


class IndexRefresher:
    def __init__(self, corpus, folder, rank):
        base = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("ann_index", base)
        self.corpus, self.folder, self.rank = corpus, folder, rank
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="refresh") if rank == 0 else None
        self.pending = None

    def launch(self, version, model):
        """Start building `version`; returns at once."""
        if self.pool is None:
            return
        snapshot = copy.deepcopy(model).eval()
        self.pending = self.pool.submit(self._build, version, snapshot)

    def fetch(self, version):
        """Negatives of `version`, an array [train queries, NEGATIVES] of doc ids."""
        if self.pending is not None:
            wait([self.pending])
        path = self.store.get(f"v{version}").decode()
        return np.load(path)

    @torch.no_grad()
    def _build(self, version, model):
        ids = self.corpus.visible(version)
        parts = [model.encode_docs(self.corpus.doc_tokens(c)) for c in np.array_split(ids, ENCODE_CHUNKS)]
        docs = torch.cat(parts)
        queries = model.encode_queries(self.corpus.query_tokens(np.arange(self.corpus.n_train)))
        scores = queries @ docs.T
        gold = torch.from_numpy(self.corpus.gold[: self.corpus.n_train])
        inside = (gold < len(ids)).nonzero().squeeze(1)
        scores[inside, gold[inside]] = float("-inf")
        hard = scores.topk(NEGATIVES, dim=1).indices.numpy()

        path = os.path.join(self.folder, f"negatives_v{version}.npy")
        np.save(path, hard)
        self.store.set(f"v{version}", path)

    def close(self):
        if self.pool is not None:
            self.pool.shutdown()
