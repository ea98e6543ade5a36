"""Click log reader.

Every rank reads its own slice of the day's log.  The real reader pulls parquet
row groups; this one generates rows with the same shape so the trainer can be
exercised on a laptop.
"""
from dataclasses import dataclass
from typing import Dict, Iterator, List

import numpy as np
import torch

# feature -> (rows in table, embedding dim)
FEATURES = {
    "user_id": (3000, 16),
    "coupon_id": (300, 8),
    "item_id": (4000, 16),
    "query_terms": (2000, 16),
}
NUM_DENSE = 6


@dataclass
class Jagged:
    values: torch.Tensor   # int64, all ids of the feature, row after row
    lengths: torch.Tensor  # int64, how many ids each row has


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: Dict[str, Jagged]
    label: torch.Tensor


@dataclass
class Row:
    dense: np.ndarray
    sparse: Dict[str, List[int]]
    label: float


def _make_row(rng, quality, taste) -> Row:
    user = int(rng.integers(FEATURES["user_id"][0]))
    item = int(rng.zipf(1.4) % FEATURES["item_id"][0])
    terms = rng.integers(FEATURES["query_terms"][0], size=rng.integers(1, 5)).tolist()
    coupons: List[int] = []
    if rng.random() < 0.05:
        coupons = rng.integers(FEATURES["coupon_id"][0], size=rng.integers(1, 3)).tolist()
    dense = rng.normal(size=NUM_DENSE).astype(np.float32)
    logit = quality[item] + 0.8 * float(dense @ taste) + (1.5 if coupons else 0.0) - 0.5
    label = float(rng.random() < 1.0 / (1.0 + np.exp(-logit)))
    sparse = {"user_id": [user], "item_id": [item], "query_terms": terms, "coupon_id": coupons}
    return Row(dense, sparse, label)


def collate(rows: List[Row]) -> Batch:
    sparse: Dict[str, Jagged] = {}
    for name in FEATURES:
        lists = [row.sparse[name] for row in rows]
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
        values = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
        if len(values):
            sparse[name] = Jagged(values, lengths)
    return Batch(
        dense=torch.from_numpy(np.stack([row.dense for row in rows])),
        sparse=sparse,
        label=torch.tensor([row.label for row in rows]),
    )


class ClickLog:
    def __init__(self, num_rows: int, batch_size: int, seed: int, rank: int):
        world_rng = np.random.default_rng(seed)
        quality = world_rng.normal(size=FEATURES["item_id"][0])
        taste = world_rng.normal(size=NUM_DENSE) / NUM_DENSE ** 0.5
        rng = np.random.default_rng([seed, 31, rank])
        self.rows = [_make_row(rng, quality, taste) for _ in range(num_rows)]
        self.batch_size = batch_size
        self._order = np.random.default_rng([seed, 77, rank])

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def batches(self, shuffle: bool = True) -> Iterator[Batch]:
        order = np.arange(len(self.rows))
        if shuffle:
            self._order.shuffle(order)
        for k in range(len(self)):
            picked = order[k * self.batch_size:(k + 1) * self.batch_size]
            yield collate([self.rows[i] for i in picked])
