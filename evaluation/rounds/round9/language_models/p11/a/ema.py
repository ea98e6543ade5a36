class Ema:
    """Average of the full weights, held by rank 0 only."""

    def __init__(self, decay):
        self.decay, self.average = decay, None

    def update(self, state):
        if not state:
            return
        if self.average is None:
            self.average = {k: v.clone() for k, v in state.items()}
        for k, v in state.items():
            self.average[k].lerp_(v, 1 - self.decay)

    def snapshot(self):
        return {k: v.clone() for k, v in self.average.items()}
