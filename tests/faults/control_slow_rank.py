"""One rank is slower than the other in every step; DDP waits for it each time."""

import time

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}

rank, _ = begin()
trainer = Trainer()
for _ in range(4):
    time.sleep(1.5 * rank)
    trainer.step()
end()
