"""In one of two launches rank 0 waits for a condition that was signalled before it waited."""

import os
import threading

from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "flaky", "repeat": 2}

rank, _ = begin()
trainer = Trainer()
ready = threading.Condition()
late = FAULT and os.environ["NSA_OUT_DIR"].rstrip("/").endswith("~2")
for step in range(1, 6):
    if rank == 0 and step == 3:
        with ready:
            signaller = threading.Thread(target=lambda: (ready.acquire(), ready.notify(), ready.release()))
            if late:
                ready.notify()
            else:
                signaller.start()
            ready.wait()
    trainer.step()
end()
