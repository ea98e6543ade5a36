import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Accelerator:
    """Thin layer over torch.distributed, enough for supervised finetuning on one node."""

    def __init__(self, gradient_accumulation_steps=1):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.process_index = dist.get_rank()
        self.num_processes = dist.get_world_size()
        self.local_process_index = int(os.environ.get("LOCAL_RANK", 0))
        self.gradient_accumulation_steps = gradient_accumulation_steps

    @property
    def is_main_process(self):
        return self.process_index == 0

    def print(self, *args):
        if self.is_main_process:
            print(*args, flush=True)

    def wait_for_everyone(self):
        dist.barrier()

    def prepare_model(self, model):
        return DDP(model)

    def prepare_loader(self, dataset, batch_size, collate_fn, shuffle):
        sampler = DistributedSampler(dataset, self.num_processes, self.process_index, shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn)

    def unwrap_model(self, model):
        return model.module if isinstance(model, DDP) else model

    def reduce_mean(self, value):
        t = torch.tensor([float(value)])
        dist.all_reduce(t)
        return (t / self.num_processes).item()

    def end(self):
        dist.barrier()
        dist.destroy_process_group()
