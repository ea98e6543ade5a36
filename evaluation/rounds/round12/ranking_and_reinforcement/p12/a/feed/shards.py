import json
import os

import numpy as np


def write_shards(folder, shards, seed):
    """Impressions in jsonl shards; a row without history is a cold user."""
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(seed)
    for s in range(shards):
        with open(os.path.join(folder, f"part-{s:02d}.jsonl"), "w") as fh:
            for _ in range(150):
                warm = rng.random() < (0.95 if s < shards - 1 else 0.45)
                length = int(rng.integers(2, 9)) if warm else 0
                topic = int(rng.integers(0, 5))
                row = {
                    "history": [int(v) * 5 + topic for v in rng.integers(0, 12, length)],
                    "item": int(rng.integers(0, 60)),
                }
                row["click"] = int(row["item"] % 5 == topic)
                fh.write(json.dumps(row) + "\n")


class ShardReader:
    """The warm rows of the shards of one rank, in batches."""

    def __init__(self, folder, rank, world, batch):
        names = sorted(n for n in os.listdir(folder) if n.endswith(".jsonl"))
        self.paths = [os.path.join(folder, n) for n in names[rank::world]]
        self.batch = batch

    def rows(self):
        for path in self.paths:
            with open(path) as fh:
                for line in fh:
                    row = json.loads(line)
                    if row["history"]:
                        yield row

    def __iter__(self):
        rows = []
        for row in self.rows():
            rows.append(row)
            if len(rows) == self.batch:
                yield rows
                rows = []
