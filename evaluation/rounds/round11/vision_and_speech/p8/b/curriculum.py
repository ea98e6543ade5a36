class NoiseCurriculum:
    """Raises the noise level once the smoothed loss has been low for a while."""

    LEVELS = (0.3, 0.8, 1.3, 1.8)

    def __init__(self, threshold=0.9, hold=6, momentum=0.8):
        self.threshold, self.hold, self.momentum = threshold, hold, momentum
        self.level, self.calm, self.smooth = 0, 0, None

    @property
    def noise(self):
        return self.LEVELS[self.level]

    def observe(self, loss):
        self.smooth = loss if self.smooth is None else self.momentum * self.smooth + (1 - self.momentum) * loss
        self.calm = self.calm + 1 if self.smooth < self.threshold else 0
        if self.calm >= self.hold and self.level + 1 < len(self.LEVELS):
            self.level += 1
            self.calm = 0
            return True
        return False

    def state_dict(self):
        return {"level": self.level, "calm": self.calm, "smooth": self.smooth}

    def load_state_dict(self, state):
        self.level, self.calm, self.smooth = state["level"], state["calm"], state["smooth"]
