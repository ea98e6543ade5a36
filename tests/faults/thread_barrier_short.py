"""Two threads meet at a barrier that is made for three, on the last rank."""

import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 5}

rank, world_size = begin()
trainer = Trainer()
meet = threading.Barrier(3 if FAULT and rank == world_size - 1 else 2)
helper = threading.Thread(target=meet.wait, daemon=True)
helper.start()
for number in range(STEPS):
    loss = trainer.model(batch()).sum()
    if number == 4:
        meet.wait()  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
