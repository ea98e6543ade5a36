"""The ranks take turns at being slow, and rank 0 evaluates every ten steps; no rank is slow in most steps."""

import random
import time

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}

rank, _ = begin()
trainer = Trainer()
uneven = random.Random(rank)
for step in range(40):
    time.sleep(uneven.choice((0.01, 0.1)))
    trainer.step()
    if rank == 0 and step % 10 == 9:
        time.sleep(0.5)
end()
