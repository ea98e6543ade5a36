"""Which steps use the teacher's soft targets."""
from dataclasses import dataclass


@dataclass
class HintPolicy:
    rate: float = 0.6
    decay: float = 0.999
    floor: float = 0.25
    credit: float = 0.0

    def due(self):
        """Accumulates credit at the current rate; a hint is due when one whole unit is there."""
        self.credit += self.rate
        self.rate = max(self.floor, self.rate * self.decay)
        if self.credit < 1.0:
            return False
        self.credit -= 1.0
        return True
