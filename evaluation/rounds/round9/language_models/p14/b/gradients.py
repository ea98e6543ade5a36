import torch.distributed as dist


def reduce_gradients(model, layout):
    """Dense parameters over all ranks, expert parameters over the copies of that expert."""
    experts = {id(p) for p in model.experts.expert_parameters()}
    world = dist.get_world_size()
    for p in model.parameters():
        group = layout.expert_dp_group if id(p) in experts else None
        dist.all_reduce(p.grad, group=group)
        p.grad /= world
