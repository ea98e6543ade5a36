"""A long start without a word: something is prepared before the process group is joined."""

import time

LABEL = {"verdict": "PASS"}

time.sleep(7)

from _job import Trainer, begin, end  # noqa: E402

begin()
trainer = Trainer()
for _ in range(3):
    trainer.step()
end()
