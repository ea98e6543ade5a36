import torch.nn.functional as F


class StopTraining(Exception):
    pass


class Trainer:
    def __init__(self, model, opt, callbacks=()):
        self.model, self.opt = model, opt
        self.callbacks = list(callbacks)
        self.step, self.loss = 0, float("nan")

    def emit(self, event, *args):
        for cb in self.callbacks:
            getattr(cb, event)(self, *args)

    def _train_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.step += 1
        self.loss = loss.item()
        self.emit("on_step_end")

    def fit(self, batches, max_steps):
        """Trains until `max_steps` or until a callback raises StopTraining; returns the reason."""
        self.emit("on_train_begin")
        try:
            while self.step < max_steps:
                self._train_step(next(batches))
        except StopTraining as e:
            return str(e)
        self.emit("on_train_end")
        return "max_steps"
