import json
import os
from collections import defaultdict

import numpy as np
import torch


def write_events(path, cfg):
    """Synthetic click log, one json object a line."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rng = np.random.default_rng(cfg.seed)
    taste = rng.integers(0, 4, cfg.users)
    with open(path, "w") as fh:
        for u in range(cfg.users):
            for _ in range(cfg.events_per_user):
                item = int(rng.integers(0, cfg.items // 4)) * 4 + int(taste[u])
                fh.write(json.dumps({"user": f"u-{u:05d}", "item": item % cfg.items}) + "\n")


def read_events(path):
    by_user = defaultdict(list)
    with open(path) as fh:
        for line in fh:
            row = json.loads(line)
            by_user[row["user"]].append(row["item"])
    return dict(by_user)


def bucket_of(user, buckets):
    return hash(user) % buckets


class UserShard:
    """The users of one trainer. Every trainer serves as many users as the
    smallest bucket has, so that an epoch has the same length everywhere."""

    def __init__(self, by_user, rank, world):
        buckets = [[] for _ in range(world)]
        for user in sorted(by_user):
            buckets[bucket_of(user, world)].append(user)
        self.length = min(len(b) for b in buckets)
        self.users = buckets[rank][: self.length]
        self.by_user = by_user

    def __len__(self):
        return self.length

    def epoch(self, seed):
        order = np.random.default_rng(seed).permutation(len(self.users))
        for k in order:
            user = self.users[k]
            yield int(user[2:]), torch.tensor(self.by_user[user])
