"""Only rank 0 asks for the full state dict, which gathers every shard from everybody."""

import torch
from _job import FAULT, begin, blocks, end
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

LABEL = {"verdict": "FAIL", "cause": "rank0_only_collective", "culprit": [0], "step": 3}

rank, _ = begin()
model = blocks()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())


def checkpoint() -> int:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return len(get_model_state_dict(model, options=options))  # to blame


for step in range(1, 6):
    model(torch.randn(4, 16)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and (rank == 0 or not FAULT):
        checkpoint()
end()
