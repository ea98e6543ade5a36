"""Rank 1 walks a tree that contains itself."""

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [1], "step": 3}


def depth(node: dict) -> int:
    return 1 + max((depth(child) for child in node["children"]), default=0)  # to blame


tree: dict = {"children": [{"children": []}]}
rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 1 and step == 3:
        if FAULT:
            tree["children"].append(tree)
        depth(tree)
    loss.backward()
    trainer.optimizer.step()
end()
