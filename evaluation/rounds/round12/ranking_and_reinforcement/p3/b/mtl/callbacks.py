import random

import torch.distributed as dist


class Callback:
    def after_step(self, trainer, step, task, batch, loss):
        pass


class RunningLoss(Callback):
    def __init__(self, decay=0.9):
        self.decay, self.value = decay, {}

    def after_step(self, trainer, step, task, batch, loss):
        old = self.value.get(task, loss)
        self.value[task] = self.decay * old + (1 - self.decay) * loss


class SamplePreview(Callback):
    """Shows one example of the batch now and then."""

    def __init__(self, every):
        self.every = every

    def after_step(self, trainer, step, task, batch, loss):
        if dist.get_rank() or step % self.every:
            return
        x, y = batch
        k = random.randrange(len(x))
        print(f"[{step:3d}] {task:5s} x0={x[k, 0]:+.2f} y={y[k]:.2f} loss={loss:.4f}", flush=True)
