import torch
import torch.distributed as dist

from stencil import rollout


@torch.no_grad()
def validation_error(model, case, horizon):
    """Relative error of free-running rollouts on an unseen case, over the whole ring."""
    truth = case[1:horizon + 1, None, None]
    pred = rollout(model, case[0, None, None], horizon)
    sums = torch.stack([(pred - truth).square().sum(), truth.square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())
