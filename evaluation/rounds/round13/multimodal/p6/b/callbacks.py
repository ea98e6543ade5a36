import json
import time
from pathlib import Path


class Callback:
    def on_fit_start(self, trainer): ...
    def on_step_end(self, trainer, step, loss): ...
    def on_epoch_end(self, trainer, epoch): ...
    def on_fit_end(self, trainer): ...


class Progress(Callback):
    def __init__(self, every=20):
        self.every = every

    def on_fit_start(self, trainer):
        self.started = time.perf_counter()

    def on_step_end(self, trainer, step, loss):
        if step % self.every:
            return
        mode = "soft" if trainer.hints.due() else "hard"
        rate = step / (time.perf_counter() - self.started)
        print(f"step {step:4d} loss {loss:.4f} targets {mode} {rate:.1f} steps/s", flush=True)


class History(Callback):
    def __init__(self, path):
        self.path, self.rows, self.losses = Path(path), [], []

    def on_step_end(self, trainer, step, loss):
        self.losses.append(loss)

    def on_epoch_end(self, trainer, epoch):
        self.rows.append({"epoch": epoch, "loss": sum(self.losses) / len(self.losses), "accuracy": trainer.accuracy})
        self.losses.clear()

    def on_fit_end(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.rows, indent=1))
