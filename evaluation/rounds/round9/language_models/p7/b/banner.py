import platform

import torch
import torch.distributed as dist


def describe(model, curriculum, verbose_rank):
    """One description of the run, printed by the rank that owns the log file."""
    if dist.get_rank() != verbose_rank:
        return
    params = sum(p.numel() for p in model.parameters())
    print(f"torch {torch.__version__} on {platform.system()}, {dist.get_world_size()} ranks", flush=True)
    print(f"model: {params} parameters, lengths {curriculum.lengths}", flush=True)
    print(f"curriculum messages start at {curriculum.channel.next_key()}", flush=True)
