"""Thin process helper so that the training script reads the same on one or many processes."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Launcher:
    def __init__(self, output_dir, accumulation=1):
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.process_index = dist.get_rank()
        self.num_processes = dist.get_world_size()
        self.output_dir = output_dir
        self.accumulation = accumulation
        if self.is_main_process:
            os.makedirs(output_dir, exist_ok=True)
        self.wait_for_everyone()

    @property
    def is_main_process(self):
        return self.process_index == 0

    def wait_for_everyone(self):
        dist.barrier()

    @contextlib.contextmanager
    def main_process_first(self):
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    def reduce_sum(self, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    def reduce_mean(self, t):
        return self.reduce_sum(t) / self.num_processes

    def prepare(self, model):
        return DistributedDataParallel(model)

    def unwrap(self, model):
        return model.module if isinstance(model, DistributedDataParallel) else model

    @contextlib.contextmanager
    def accumulate(self, model, micro):
        last = (micro + 1) % self.accumulation == 0
        with contextlib.nullcontext() if last else model.no_sync():
            yield

    def end_training(self):
        dist.destroy_process_group()
