"""Telemetry shards: one site per rank, fixed-size files, with per-row quality flags."""
import numpy as np
import torch

# share of readings that a site's gateway flags as unreliable
SITE_DROPOUT = {0: 0.0, 1: 0.0, 2: 0.22, 3: 0.05}


class SiteTelemetry:
    def __init__(self, site, rows=1280, channels=12, seed=7):
        rng = np.random.default_rng(seed * 1000 + site)
        t = np.arange(rows)[:, None] / 40.0
        phase = rng.uniform(0, np.pi, size=(1, channels))
        self.values = (np.sin(t + phase) + 0.1 * rng.standard_normal((rows, channels))).astype(np.float32)
        self.ok = rng.random(rows) >= SITE_DROPOUT.get(site, 0.0)

    def __len__(self):
        return len(self.values)


class ResumableBatches:
    """Shuffled batches of a shard; `rows_in_epoch` is what a checkpoint needs to go on mid-epoch."""

    def __init__(self, shard, batch_size, seed=0):
        self.shard, self.batch_size, self.seed = shard, batch_size, seed
        self.epoch = 0
        self.rows_in_epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch, "rows_in_epoch": self.rows_in_epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.rows_in_epoch = state["rows_in_epoch"]

    def __iter__(self):
        order = np.random.default_rng(self.seed + self.epoch).permutation(len(self.shard))
        first = self.rows_in_epoch // self.batch_size
        for b in range(first, len(order) // self.batch_size):
            rows = order[b * self.batch_size:(b + 1) * self.batch_size]
            kept = rows[self.shard.ok[rows]]
            self.rows_in_epoch += len(rows)
            yield torch.from_numpy(self.shard.values[kept])
        self.epoch += 1
        self.rows_in_epoch = 0
