import time

from .writer import AsyncScalarWriter


class Callback:
    def on_train_begin(self, trainer):
        pass

    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        pass

    def on_train_end(self, trainer):
        pass


class ScalarLogger(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_begin(self, trainer):
        self.writer = AsyncScalarWriter(self.path)

    def on_step_end(self, trainer):
        self.writer.add("train/loss", trainer.last_loss, trainer.step)

    def on_epoch_end(self, trainer):
        for k, v in trainer.metrics.items():
            self.writer.add(k, v, trainer.step)
        print(f"epoch {trainer.epoch} " + " ".join(f"{k} {v:.4f}" for k, v in trainer.metrics.items()),
              flush=True)

    def on_train_end(self, trainer):
        self.writer.close()


class StepTimer(Callback):
    """Steps per second since the last epoch, of the rank that logs."""

    def on_train_begin(self, trainer):
        self.t0, self.s0 = time.perf_counter(), 0

    def on_epoch_end(self, trainer):
        now = time.perf_counter()
        trainer.metrics["steps_per_s"] = (trainer.step - self.s0) / (now - self.t0)
        self.t0, self.s0 = now, trainer.step


class EarlyStopping(Callback):
    """Stops when the validation loss, which is the same on every rank, no longer falls."""

    def __init__(self, patience, min_delta):
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.bad = 0

    def on_epoch_end(self, trainer):
        v = trainer.metrics["val/loss"]
        if v < self.best - self.min_delta:
            self.best, self.bad = v, 0
        else:
            self.bad += 1
            trainer.should_stop = self.bad >= self.patience
