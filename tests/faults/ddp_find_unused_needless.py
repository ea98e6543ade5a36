"""find_unused_parameters is set for a model of which every step uses every parameter: right, and slower."""

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "find_unused_needless"}

begin()
trainer = Trainer(find_unused_parameters=FAULT)
for _ in range(STEPS):
    trainer.step()
end()
