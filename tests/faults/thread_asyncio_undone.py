"""A coroutine of rank 1 awaits a future that nobody completes; its event loop has nothing else to do."""

import asyncio

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "cause": "blocked_io", "culprit": [1], "step": 2, "limits": {"open_wait_s": 6},
}  # fmt: skip


async def fetch(broken: bool) -> int:
    answer = asyncio.get_running_loop().create_future()
    if not broken:
        answer.set_result(1)
    return await answer


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    asyncio.run(fetch(FAULT and rank == 1 and step == 2))  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
