import os
from dataclasses import dataclass, field


def _int(name, default=0):
    value = os.environ.get(name, "")
    return int(value) if value else default


@dataclass
class Env:
    """What the launcher says about this process."""

    rank: int = field(default_factory=lambda: _int("RANK"))
    world: int = field(default_factory=lambda: _int("WORLD_SIZE", 1))
    local_rank: int = field(default_factory=lambda: _int("LOCAL_RANK"))
    node: int = field(default_factory=lambda: _int("GROUP_RANK"))
    nodes: int = field(default_factory=lambda: _int("GROUP_WORLD_SIZE", 1))
    data_threads: int = field(default_factory=lambda: _int("DATA_THREADS", 1))

    @property
    def is_main(self):
        return self.rank == 0


@dataclass
class ShardSpec:
    index: int
    count: int
    seed: int


def shard_spec(env, seed):
    """Part `index` of `count` of the training files belongs to this process."""
    return ShardSpec(index=env.node, count=env.nodes, seed=seed)
