"""Quantile bins shared by all workers. Each worker works out its part of the columns and publishes the edges."""
import json

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class BinRegistry:
    def __init__(self, n_bins=16):
        self.n_bins = n_bins
        self.store = dist.PrefixStore("bins", _get_default_store())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def publish(self, columns, names):
        probs = np.linspace(0, 1, self.n_bins + 1)[1:-1]
        for name in names[self.rank::self.world]:
            edges = np.quantile(np.asarray(columns[name], dtype=float), probs)
            self.store.set(name, json.dumps(edges.tolist()))

    def collect(self, names):
        return {name: np.asarray(json.loads(self.store.get(name))) for name in names}


def encode(columns, schema, edges, n_bins, n_hash):
    """Integer codes: bin numbers for numeric columns, stable hash buckets for the others."""
    codes = {name: np.searchsorted(edges[name], np.asarray(columns[name], dtype=float)) for name in schema.numeric}
    for name in schema.categorical:
        codes[name] = n_bins + np.array([sum(map(ord, v)) % n_hash for v in columns[name]])
    return np.stack([codes[c] for c in sorted(codes)], axis=1).astype(np.int64)
