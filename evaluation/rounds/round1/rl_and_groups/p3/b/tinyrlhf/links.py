"""Who is who, and how the roles talk to each other."""
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Topology:
    rank: int
    world: int
    reward_rank: int
    policy_ranks: list
    policy_group: Any

    @classmethod
    def build(cls):
        rank, world = dist.get_rank(), dist.get_world_size()
        policy_ranks = list(range(world - 1))
        return cls(rank, world, world - 1, policy_ranks, dist.new_group(policy_ranks))

    @property
    def is_reward(self):
        return self.rank == self.reward_rank

    @property
    def role(self):
        return "reward" if self.is_reward else "policy"


def collect_rollouts(topo, mine):
    """Policy ranks hand over their rollouts; the reward rank gets the list of all of them."""
    box = [None] * topo.world if topo.is_reward else None
    dist.gather_object(mine, box, dst=topo.reward_rank)
    return [box[r] for r in topo.policy_ranks] if topo.is_reward else None


def return_rewards(topo, per_rank=None):
    """The way back. Every policy rank receives the rewards of its own rollouts."""
    out = [None]
    src_list = None
    if topo.is_reward:
        src_list = list(per_rank) + [None]
    dist.scatter_object_list(out, src_list, src=topo.reward_rank)
    return out[0]


def average_gradients(topo, params):
    handles = []
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        handles.append(dist.all_reduce(p.grad, group=topo.policy_group, async_op=True))
    for h in handles:
        h.wait()
    for p in params:
        p.grad /= len(topo.policy_ranks)
