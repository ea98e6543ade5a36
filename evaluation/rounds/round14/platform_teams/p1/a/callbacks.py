import logging
import time

log = logging.getLogger("trainer")


class Callback:
    def on_step_end(self, trainer, loss):
        pass

    def on_epoch_end(self, trainer, summary):
        pass


class Throughput(Callback):
    def __init__(self, every):
        self.every = every
        self.tokens = 0
        self.t0 = time.perf_counter()

    def on_step_end(self, trainer, loss):
        self.tokens += trainer.last_tokens
        if trainer.step % self.every == 0 and trainer.rank == 0:
            rate = self.tokens / (time.perf_counter() - self.t0)
            log.info("step %d loss %.4f %.0f tok/s", trainer.step, loss, rate)


class EpochReport(Callback):
    def on_epoch_end(self, trainer, summary):
        if trainer.rank == 0:
            log.info("epoch %d mean loss %.4f accuracy %.3f rows %d", trainer.epoch, *summary)
