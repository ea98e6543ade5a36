"""Simulated hospital clients for a federated study."""
from dataclasses import dataclass
import zlib

import numpy as np
import torch


@dataclass(frozen=True)
class Client:
    cid: str
    rows: int
    shift: float

    def data(self, dim, truth):
        rng = np.random.default_rng(zlib.crc32(self.cid.encode()))
        x = rng.normal(self.shift, 1.0, size=(self.rows, dim)).astype(np.float32)
        y = (x @ truth + 0.3 * rng.normal(size=self.rows) > 0).astype(np.float32)
        return torch.from_numpy(x), torch.from_numpy(y)


class Registry:
    SITES = ("north", "south", "harbor", "valley")

    def __init__(self, per_site=5, seed=8):
        rng = np.random.default_rng(seed)
        self.clients = [
            Client(f"{site}-{k:02d}", int(rng.integers(40, 120)), float(rng.normal(0, 0.3)))
            for site in self.SITES for k in range(per_site)
        ]

    def cohort(self, round_no, size):
        rng = np.random.default_rng((99, round_no))
        picks = rng.choice(len(self.clients), size=size, replace=False)
        return [self.clients[i] for i in sorted(picks)]


class Placement:
    """Maps clients to worker processes; stable, so that a client's cache stays warm on its worker."""

    def __init__(self, world):
        self.world = world

    def owner(self, client):
        return zlib.crc32(client.cid.encode()) % self.world
