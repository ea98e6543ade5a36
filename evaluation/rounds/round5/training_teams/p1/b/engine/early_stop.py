class EarlyStopping:
    """Asks for a stop when the monitored value has not improved `patience` times in a row."""

    def __init__(self, patience=2, min_delta=1e-3, mode="min"):
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1.0 if mode == "min" else -1.0
        self.best = float("inf")
        self.bad = 0

    def step(self, value):
        value = self.sign * value
        if value < self.best - self.min_delta:
            self.best = value
            self.bad = 0
        else:
            self.bad += 1
        return self.bad >= self.patience
