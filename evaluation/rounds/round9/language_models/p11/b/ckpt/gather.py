from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def full_state(model):
    """Unsharded copy on rank 0, empty elsewhere. Every rank has to call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
