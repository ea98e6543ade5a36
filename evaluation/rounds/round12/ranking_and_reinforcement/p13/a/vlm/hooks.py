import os

import torch
import torch.distributed as dist

from .registry import HOOKS


class Hook:
    def after_step(self, runner):
        pass

    def after_epoch(self, runner):
        pass


@HOOKS.add("text")
class TextLog(Hook):
    def after_epoch(self, runner):
        t = torch.tensor([sum(runner.losses), len(runner.losses)])
        dist.all_reduce(t)
        if runner.rank == 0:
            print(f"epoch {runner.epoch} loss {t[0] / t[1]:.4f}", flush=True)
        runner.losses.clear()


@HOOKS.add("clamp")
class ClampTemperature(Hook):
    def __init__(self, high):
        self.high = high

    def after_step(self, runner):
        runner.model.module.temperature.data.clamp_(0.0, self.high)


@HOOKS.add("save")
class Save(Hook):
    def __init__(self, folder):
        self.folder = folder

    def after_epoch(self, runner):
        if runner.rank == 0:
            os.makedirs(self.folder, exist_ok=True)
            torch.save(runner.model.module.state_dict(), os.path.join(self.folder, "dual.pt"))
        dist.barrier()
