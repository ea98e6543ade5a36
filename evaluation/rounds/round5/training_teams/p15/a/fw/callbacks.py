import json
import queue
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .trainer import StopTraining


class Callback:
    def on_train_begin(self, trainer):
        pass

    def on_step_end(self, trainer):
        pass

    def on_eval_end(self, trainer, metrics):
        pass

    def on_train_end(self, trainer):
        pass


class EvalEvery(Callback):
    def __init__(self, n, data):
        self.n, self.data = n, data

    @torch.no_grad()
    def on_step_end(self, trainer):
        if trainer.step % self.n:
            return
        trainer.model.eval()
        x, y = self.data
        out = trainer.model.module(x)
        m = torch.stack([F.cross_entropy(out, y), (out.argmax(1) == y).float().mean()])
        dist.all_reduce(m)
        m /= dist.get_world_size()
        trainer.model.train()
        trainer.emit("on_eval_end", {"val_loss": m[0].item(), "val_acc": m[1].item()})


class EarlyStop(Callback):
    def __init__(self, key="val_acc", target=0.95):
        self.key, self.target = key, target

    def on_eval_end(self, trainer, metrics):
        if metrics[self.key] >= self.target:
            raise StopTraining(f"{self.key} reached {metrics[self.key]:.3f}")


class JsonLog(Callback):
    """Writes one JSON line for each event; the file is written by a thread of its own."""

    def __init__(self, path, every=5):
        self.path, self.every = path, every
        self.events = queue.Queue()

    def _write(self):
        with open(self.path, "w") as f:
            while True:
                event = self.events.get()
                if event is None:
                    break
                f.write(json.dumps(event) + "\n")
                f.flush()

    def on_train_begin(self, trainer):
        self.thread = threading.Thread(target=self._write, name="json-log")
        self.thread.start()

    def on_step_end(self, trainer):
        if trainer.step % self.every == 0:
            self.events.put({"step": trainer.step, "loss": round(trainer.loss, 5)})

    def on_eval_end(self, trainer, metrics):
        self.events.put({"step": trainer.step, **metrics})
        print(f"step {trainer.step} " + " ".join(f"{k} {v:.4f}" for k, v in metrics.items()), flush=True)

    def on_train_end(self, trainer):
        self.events.put(None)
        self.thread.join()
