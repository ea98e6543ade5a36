"""Half of the layers are frozen on purpose, before DDP sees the model."""

from _job import Trainer, begin, blocks, end

LABEL = {"verdict": "PASS"}

begin()
model = blocks(depth=4)
for parameter in model[:2].parameters():
    parameter.requires_grad_(False)
trainer = Trainer(model)
for _ in range(4):
    trainer.step()
end()
