"""Rank 1 puts each batch into a shared segment for a reader that was taken out, and unlinks none of them."""

from multiprocessing import shared_memory

from _job import FAULT, Trainer, batch, begin, end

LABEL = {"verdict": "PASS", "cause": "dirty_exit", "culprit": [1]}


def publish(values: bytes) -> shared_memory.SharedMemory:
    segment = shared_memory.SharedMemory(create=True, size=len(values))
    segment.buf[: len(values)] = values
    return segment


rank, _ = begin()
trainer = Trainer()
published = []
for _ in range(3):
    trainer.step()
    if rank == 1:
        published.append(publish(batch().numpy().tobytes()))
for segment in published:
    segment.close()
    if not FAULT:
        segment.unlink()
end()
