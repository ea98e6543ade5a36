"""Four ranks with groups, a mesh, point-to-point partners and functional collectives: what the board tells of each.

They stay until a line comes in: groups are told by the beat.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def exchange(rank: int, ends: dist.ProcessGroup) -> None:
    """Ranks 0 and 3 exchange by their numbers in the group, 1 and 2 in a batch."""
    value = torch.ones(3)
    if rank == 0:
        dist.send(value, group=ends, group_dst=1)
    elif rank == 3:
        dist.recv(value, group=ends, group_src=0)
    else:
        other = 3 - rank
        sent, received = torch.ones(2), torch.ones(2)
        batch = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ends = dist.new_group([0, 3])
    exchange(rank, ends)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].size() == 2
    init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    assert tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local().sum().item() == 28
    print("ready", flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
