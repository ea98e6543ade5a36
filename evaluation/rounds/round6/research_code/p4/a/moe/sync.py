import torch.distributed as dist


def is_expert(name):
    return ".expert." in name


def broadcast_parameters(model, groups):
    """Same start everywhere: dense weights over all ranks, an expert over its replicas."""
    for name, p in model.named_parameters():
        if is_expert(name):
            dist.broadcast(p.data, src=groups.dp_ranks[0], group=groups.dp)
        else:
            dist.broadcast(p.data, src=0)


def average_gradients(model, groups):
    world = dist.get_world_size()
    for name, p in model.named_parameters():
        if is_expert(name):
            dist.all_reduce(p.grad, group=groups.dp)
        else:
            dist.all_reduce(p.grad)
        p.grad /= world
