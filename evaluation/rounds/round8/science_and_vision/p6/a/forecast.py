"""Learned correction on top of a small shallow-water core, latitude bands on ranks."""
import configparser
import pathlib

import torch
import torch.distributed as dist

from atmos.core import Band, ShallowWater
from atmos.correction import Correction, sync_gradients
from atmos.diag import Diagnostics
from atmos.halo import HaloExchanger

HERE = pathlib.Path(__file__).resolve().parent


def truth_step(core, field):
    """Reference tendency used as the training target."""
    inner = field[..., 1:-1, :]
    return core.tendency(field) * 1.05 + 0.02 * torch.sin(inner)


def main():
    ini = configparser.ConfigParser()
    ini.read(HERE / "run.ini")
    grid, run = ini["grid"], ini["run"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(run.getint("seed"))
    band = Band(grid.getint("nlat"), grid.getint("nlon"), rank, world)
    halo = HaloExchanger(rank, world, width=1)
    core = ShallowWater(dt=run.getfloat("dt"))
    model = Correction(hidden=6)
    opt = torch.optim.Adam(model.parameters(), lr=run.getfloat("lr"))
    diag = Diagnostics(rank, run.getint("log_every"))
    for cycle in range(run.getint("cycles")):
        state = band.initial(cycle)
        total = 0.0
        for lead in range(run.getint("lead_steps")):
            padded = halo.pad(state)
            target = truth_step(core, padded)
            pred = core.tendency(padded) + model(padded)
            loss = (pred - target).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            sync_gradients(model, world)
            opt.step()
            state = core.advance(state, target)
            total += loss.item()
            diag.lead(cycle, lead, state, halo)
        diag.cycle(cycle, total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
