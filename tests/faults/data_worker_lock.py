"""A thread of rank 0 holds the cache's lock while the second epoch forks its worker, which waits for its own copy."""

import threading

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "dataloader_worker_blocked", "culprit": [0], "step": 3}

rank, _ = begin()
cache_lock = threading.Lock()


class Cached(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        with cache_lock:
            return torch.full((16,), index / 8)


def refresh(held: threading.Event, done: threading.Event) -> None:
    with cache_lock:  # to blame
        held.set()
        done.wait()


trainer = Trainer()
for epoch in range(2):
    held, done = threading.Event(), threading.Event()
    if epoch == 1 and rank == 0:
        threading.Thread(target=refresh, args=(held, done), daemon=True).start()
        held.wait()
        if not FAULT:
            done.set()
    for samples in DataLoader(Cached(), batch_size=4, num_workers=0 if epoch == 0 else 1):
        trainer.model(samples).mean().backward()
        trainer.optimizer.step()
end()
