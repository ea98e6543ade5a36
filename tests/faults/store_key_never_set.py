"""Everybody reads where the data lies from the store, but rank 0 writes it under another name."""

import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "store_key_missing", "culprit": [0, 1]}

rank, _ = begin()
trainer = Trainer()
trainer.step()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("data_path" if FAULT else "data/path", "shards")
path = store.get("data/path")  # to blame
for _ in range(3):
    trainer.step()
end()
