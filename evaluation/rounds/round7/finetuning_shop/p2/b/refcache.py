"""Reference log-probs are computed once per job by the first rank and shared through the disk."""
import json
import os
import time

import torch


def fingerprint(view):
    text = json.dumps(view, sort_keys=True)
    return f"{hash(text) & 0xFFFFFFFFFFFF:012x}"


def cache_path(settings):
    return os.path.join(settings.cache_dir, f"ref_{fingerprint(settings.reference_view())}.pt")


def store(path, tensors):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    tmp = f"{path}.{os.getpid()}.tmp"
    torch.save(tensors, tmp)
    os.replace(tmp, path)


def load_or_compute(settings, rank, compute):
    path = cache_path(settings)
    if rank == 0:
        if not os.path.exists(path):
            store(path, compute())
    else:
        while not os.path.exists(path):
            time.sleep(0.2)
    return torch.load(path)
