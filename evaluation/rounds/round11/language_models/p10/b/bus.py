"""What learner and actors exchange through the job's store, and under which keys."""
import io

import torch
import torch.distributed as dist


def open_store():
    return dist.PrefixStore("rl", dist.distributed_c10d._get_default_store())


def policy_key(version):
    return f"policy/{version}"


def rollout_key(version, actor):
    return f"rollout/{version}/{actor}"


def pack(obj):
    buf = io.BytesIO()
    torch.save(obj, buf)
    return buf.getvalue()


def unpack(raw):
    return torch.load(io.BytesIO(raw), weights_only=False)
