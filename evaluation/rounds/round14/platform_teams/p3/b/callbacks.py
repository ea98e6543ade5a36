import math

from stats import Window


class Metrics:
    def __init__(self, sink, window=20):
        self.sink = sink
        self.loss = Window(window)
        self.norm = Window(window)

    def after_step(self, trainer, loss, norm):
        self.loss.push(loss)
        self.norm.push(norm)
        record = {"step": trainer.step, "loss": loss, "lr": trainer.opt.param_groups[0]["lr"]}
        if self.loss.full:
            record["loss_mean"] = self.loss.mean()
            record["loss_spread"] = self.loss.spread()
            record["norm_mean"] = self.norm.mean()
        self.sink.emit(record)

    def finish(self, trainer):
        self.sink.close()


class WarmupCosine:
    def __init__(self, base, warmup, total):
        self.base, self.warmup, self.total = base, warmup, total

    def after_step(self, trainer, loss, norm):
        s = trainer.step
        scale = s / self.warmup if s < self.warmup else 0.5 * (1 + math.cos(math.pi * s / self.total))
        for group in trainer.opt.param_groups:
            group["lr"] = self.base * scale

    def finish(self, trainer):
        pass
