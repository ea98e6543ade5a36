"""Single-file checkpoints. Only the first rank touches the disk; the others get the state over the network."""
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    best_eval: float = float("inf")


def latest(folder):
    names = sorted(n for n in os.listdir(folder) if n.startswith("step-"))
    return os.path.join(folder, names[-1]) if names else None


def save(folder, model, optim, progress):
    if dist.get_rank() == 0:
        path = os.path.join(folder, f"step-{progress.step:06d}.pt")
        torch.save({"model": model.state_dict(), "optim": optim.state_dict(),
                    "progress": asdict(progress)}, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def _broadcast_object(obj):
    box = [obj]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def restore(folder, model, optim):
    """Loads the newest checkpoint into model and optimizer and returns the progress of the run."""
    progress, optim_state = Progress(), optim.state_dict()
    if dist.get_rank() == 0:
        path = latest(folder)
        if path is not None:
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optim_state = state["optim"]
            progress = Progress(**state["progress"])
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optim.load_state_dict(_broadcast_object(optim_state))
    return _broadcast_object(progress)
