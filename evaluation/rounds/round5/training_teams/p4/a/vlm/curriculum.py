import random
from dataclasses import dataclass


@dataclass
class Stage:
    until: int
    image: float
    text: float


class Curriculum:
    """Which kind of batch comes next; shares change with the stage of training."""

    def __init__(self, stages):
        self.stages = [Stage(*s) for s in stages]
        self.counts = {"image": 0, "text": 0}

    def stage(self, step):
        for s in self.stages:
            if step < s.until:
                return s
        return self.stages[-1]

    def next_kind(self, step):
        s = self.stage(step)
        kind = random.choices(("image", "text"), weights=(s.image, s.text))[0]
        self.counts[kind] += 1
        return kind
