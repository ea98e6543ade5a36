"""Rank 1 joins a child process that waits at a barrier for a second process, which was never started."""

import multiprocessing

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 2,
}  # fmt: skip


def prepare(barrier) -> None:
    barrier.wait()  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 2:
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=prepare, args=(fork.Barrier(2 if FAULT else 1),))
        child.start()
        child.join()
    loss.backward()
    trainer.optimizer.step()
end()
