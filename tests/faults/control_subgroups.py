"""Two groups of two ranks work at their own pace; one has more to do than the other."""

import torch
import torch.distributed as dist
from _job import begin, end

LABEL = {"verdict": "PASS", "ranks": 4}

rank, _ = begin()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = pairs[rank // 2]
for _ in range(3 if rank < 2 else 40):
    found = torch.ones(1000)
    dist.all_reduce(found, group=mine)
end()
