import json
import os

import torch
import torch.distributed as dist

from space import RandomSearch
from surrogate import airfoil_table, fit
from topology import carve_cells

SETTINGS = {"cell_size": 2, "trials_per_cell": 2, "seed": 77}


def load_settings(path="sweep.json"):
    settings = dict(SETTINGS)
    if os.path.exists(path):
        with open(path) as f:
            settings.update(json.load(f))
    return settings


def search(settings, cell):
    table = airfoil_table()
    tuner = RandomSearch(settings["seed"], stream=cell.member)
    for number in range(settings["trials_per_cell"]):
        trial = tuner.ask()
        score = fit(trial, table, cell)
        dist.barrier(group=cell.group)
        tuner.tell(trial, score)
        if cell.is_leader:
            shown = " ".join(f"{k}={v:.3g}" for k, v in trial.items())
            print(f"cell {cell.index} trial {number}: {score:.5f}  {shown}", flush=True)
    return tuner.best()


def main():
    dist.init_process_group("gloo")
    settings = load_settings()
    cell = carve_cells(settings["cell_size"])
    best = search(settings, cell)
    score, trial = best
    scores = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(scores, torch.tensor([score]))
    if dist.get_rank() == int(torch.cat(scores).argmin()):
        print(f"best {score:.5f} with lr={trial['lr']:.4g} passes={trial['passes']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
