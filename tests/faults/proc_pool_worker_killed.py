"""A worker of rank 1's process pool is killed in the middle of a task; map waits for its result for ever."""

import multiprocessing
import os
import signal

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "cause": "pool_worker_lost", "culprit": [1], "step": 2, "limits": {"open_wait_s": 8},
}  # fmt: skip


def tokenize(number: int) -> int:
    if number == 3 and FAULT:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def main() -> None:
    rank, _ = begin()
    trainer = Trainer()
    for step in range(1, STEPS + 1):
        loss = trainer.model(batch()).square().mean()
        if rank == 1 and step == 2:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(tokenize, range(6), chunksize=1)  # to blame
        loss.backward()
        trainer.optimizer.step()
    end()


if __name__ == "__main__":
    main()
