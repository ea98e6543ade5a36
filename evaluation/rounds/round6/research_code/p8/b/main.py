import logging

import torch
import torch.distributed as dist
import torch.nn as nn

from clients import ClientData, CohortSampler
from fedavg import Server

CFG = dict(clients=24, per_round=6, rounds=12, local_epochs=2, lr=0.05, dim=10, classes=6, seed=42, show_every=4)
log = logging.getLogger("fed")


def show(sampler, data, cohort, rnd):
    labels = {c: sampler.example(data, c) for c in cohort[:2]}
    log.info("round %d: cohort %s, e.g. labels %s", rnd, cohort, labels)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(CFG["seed"])
    data = ClientData(CFG["clients"], CFG["classes"], CFG["dim"], CFG["seed"])
    sampler = CohortSampler(CFG["clients"], CFG["per_round"], CFG["seed"] + 1)
    model = nn.Sequential(nn.Linear(CFG["dim"], 32), nn.ReLU(), nn.Linear(32, CFG["classes"]))
    server = Server(model, data, CFG)
    for rnd in range(CFG["rounds"]):
        cohort = sampler.cohort()
        moved = server.round(cohort)
        if log.isEnabledFor(logging.INFO) and rnd % CFG["show_every"] == 0:
            show(sampler, data, cohort, rnd)
        acc = server.accuracy()
        log.info("round %d: moved %.3f accuracy %.3f", rnd, moved, acc)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
