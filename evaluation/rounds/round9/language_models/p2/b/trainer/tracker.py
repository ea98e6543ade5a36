class BestTracker:
    """Validation bookkeeping for early stopping."""

    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best = float("inf")
        self.stale = 0

    def update(self, value):
        if value < self.best - self.min_delta:
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        return self.stale >= self.patience

    def state_dict(self):
        return {"best": self.best, "stale": self.stale}

    def load_state_dict(self, state):
        self.best, self.stale = state["best"], state["stale"]
