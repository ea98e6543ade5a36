import torch
import torch.distributed as dist


def global_mean(value):
    """Mean of a scalar over all workers."""
    t = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def approx_kl(old_logp, new_logp):
    log_ratio = new_logp - old_logp
    return ((log_ratio.exp() - 1) - log_ratio).mean().item()


def explained_variance(values, returns):
    var = returns.var()
    return (1 - (returns - values).var() / (var + 1e-8)).item()
