import math


class Stateful:
    fields = ()

    @property
    def key(self):
        return type(self).__name__

    def state(self):
        return {name: getattr(self, name) for name in self.fields}

    def restore(self, state):
        for name, value in state.items():
            setattr(self, name, value)


class EarlyStop(Stateful):
    fields = ("best", "stale")

    def __init__(self, patience, min_delta=2e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.stale = math.inf, 0

    def on_validation(self, trainer, value):
        if value < self.best - self.min_delta:
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        if self.stale >= self.patience:
            trainer.should_stop = True


class PlateauLR(Stateful):
    fields = ("best", "stale")

    def __init__(self, patience, factor=0.5):
        self.patience, self.factor = patience, factor
        self.best, self.stale = math.inf, 0

    def on_validation(self, trainer, value):
        self.stale = 0 if value < self.best else self.stale + 1
        self.best = min(self.best, value)
        if self.stale > self.patience:
            for group in trainer.opt.param_groups:
                group["lr"] *= self.factor
            self.stale = 0


class History(Stateful):
    fields = ("points",)

    def __init__(self):
        self.points = []

    def on_validation(self, trainer, value):
        self.points.append((trainer.step, round(value, 6)))
