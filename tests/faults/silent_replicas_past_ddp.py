"""Training goes past the wrapper: what DDP wraps is called itself, so no gradient is reduced."""

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
trainer = Trainer()
for step in range(STEPS):
    model = trainer.model.module if FAULT and step > 1 else trainer.model
    model(batch() + rank).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
