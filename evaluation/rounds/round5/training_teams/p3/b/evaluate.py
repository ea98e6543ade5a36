import torch
import torch.distributed as dist
import torch.nn.functional as F


@torch.no_grad()
def evaluate(model, val_sets, tasks):
    """Mean loss of each task over all processes."""
    model.eval()
    local = {name: F.mse_loss(model(x), y) for name, (x, y) in val_sets.items()}
    names = set(tasks) & local.keys()
    losses = {}
    for name in names:
        value = local[name].clone()
        dist.all_reduce(value)
        losses[name] = (value / dist.get_world_size()).item()
    model.train()
    return losses
