import torch
import torch.distributed as dist


def setup():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def teardown():
    dist.destroy_process_group()


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def say(msg):
    if rank() == 0:
        print(msg, flush=True)


def wait_all():
    dist.barrier()


def sum_(t):
    dist.all_reduce(t)
    return t


def min_int(n):
    t = torch.tensor([n], dtype=torch.long)
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    return int(t)


def from_main(fn):
    """Run fn on rank 0 and give every rank its result."""
    box = [fn() if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]
