class Hook:
    def on_step(self, step, loss):
        pass

    def on_epoch(self, epoch):
        pass


class LossLogger(Hook):
    def __init__(self, rank, every):
        self.rank, self.every, self.total, self.count = rank, every, 0.0, 0

    def on_step(self, step, loss):
        self.total += loss
        self.count += 1
        if self.rank == 0 and step % self.every == 0:
            print(f"step {step:3d} loss {self.total / self.count:.4f}", flush=True)

    def on_epoch(self, epoch):
        self.total, self.count = 0.0, 0


class HookList(list):
    def fire(self, name, *args):
        for hook in self:
            getattr(hook, name)(*args)
