import json
import logging
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from clients import Client, Placement, Registry
from rounds import ClientCache, FedAvg

DIM, ROUNDS, COHORT = 12, 36, 6
log = logging.getLogger("fed")


class AuditLog:
    def __init__(self, folder, enabled):
        self.path = os.path.join(folder, "audit.jsonl")
        self.enabled = enabled

    def write(self, round_no, cohort, norms):
        if self.enabled:
            with open(self.path, "a") as fh:
                fh.write(json.dumps({"round": round_no, "updates": dict(zip([c.cid for c in cohort], norms))}) + "\n")

    def count(self):
        with open(self.path) as fh:
            return sum(1 for _ in fh)


def main():
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    truth = np.random.default_rng(1).normal(size=DIM).astype(np.float32)
    model = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, 1))
    registry, placement = Registry(), Placement(world)
    server = FedAvg(model, placement, ClientCache(DIM, truth))
    holdout = Client("holdout", 800, 0.0).data(DIM, truth)
    with tempfile.TemporaryDirectory(prefix="fed_") as folder:
        audit = AuditLog(folder, enabled=rank == 0)
        for round_no in range(ROUNDS):
            cohort = registry.cohort(round_no, COHORT)
            norms = server.round(cohort)
            audit.write(round_no, cohort, norms)
            if round_no % 6 == 5:
                acc = server.accuracy(*holdout)
                if rank == 0:
                    log.info("round %d accuracy %.3f largest update %.3f", round_no + 1, acc, max(norms))
        if rank == 0:
            log.info("audited rounds: %d", audit.count())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
