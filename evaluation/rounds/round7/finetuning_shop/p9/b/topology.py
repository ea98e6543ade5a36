import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    rank: int
    world: int
    local_world: int
    tensor_parallel: int

    @classmethod
    def from_env(cls, tensor_parallel):
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]),
                   int(os.environ["LOCAL_WORLD_SIZE"]), tensor_parallel)

    @property
    def data_parallel(self):
        return self.world // self.tensor_parallel

    @property
    def data_rank(self):
        return self.rank // self.local_world

    @property
    def is_main(self):
        return self.rank == 0
