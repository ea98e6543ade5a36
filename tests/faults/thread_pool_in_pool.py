"""A task of rank 1's only pool thread waits for another task of the same pool."""

from concurrent.futures import ThreadPoolExecutor

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 3}

pool = ThreadPoolExecutor(1 if FAULT else 2)


def tokens(text: str) -> int:
    return len(text.split())


def count(texts: list[str]) -> int:
    parts = [pool.submit(tokens, text) for text in texts]
    return sum(part.result() for part in parts)  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 1 and step == 3:
        pool.submit(count, ["a b c", "d e"]).result()
    loss.backward()
    trainer.optimizer.step()
end()
