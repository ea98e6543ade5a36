"""The log is full of alarming words that mean nothing: they are quoted from a tutorial."""

import sys

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}
QUOTED = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1. A remote worker crashed?
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600000 milliseconds
CUDA out of memory. Segmentation fault (core dumped). loss=nan
"""

begin()
trainer = Trainer()
for _ in range(3):
    trainer.step()
    print(QUOTED, file=sys.stderr)
end()
