from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardPlan:
    """Row-wise split of an embedding table: rank r owns a contiguous block of ids."""

    num_rows: int
    world: int

    @property
    def rows_per_rank(self):
        return self.num_rows // self.world

    def owner(self, ids):
        return torch.div(ids, self.rows_per_rank, rounding_mode="floor")

    def local(self, ids):
        return ids % self.rows_per_rank

    def local_rows(self, rank):
        return self.rows_per_rank
