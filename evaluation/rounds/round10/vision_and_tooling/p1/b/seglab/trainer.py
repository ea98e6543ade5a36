import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    """Iteration based trainer with hooks."""

    def __init__(self, model, loader, lr, max_iters):
        self.model = DDP(model)
        self.loader = loader
        self.max_iters = max_iters
        self.base_lr = lr
        self.optim = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.loss_fn = nn.CrossEntropyLoss()
        self.hooks = []
        self.iter = 0
        self.epoch = 0
        self.batch = None
        self.loss = None
        self.state = {}
        self._stream = None

    def register(self, hook):
        hook.trainer = self
        self.hooks.append(hook)

    def call(self, stage):
        for h in self.hooks:
            getattr(h, stage)()

    def next_batch(self):
        """Next training batch; starts another epoch when the loader is used up."""
        self.iter += 1
        if self._stream is None:
            self._stream = iter(self.loader)
        try:
            return next(self._stream)
        except StopIteration:
            self.epoch += 1
            self.loader.sampler.set_epoch(self.epoch)
            self._stream = iter(self.loader)
            return next(self._stream)

    def run_step(self):
        images, masks = self.batch
        self.loss = self.loss_fn(self.model(images), masks)
        self.optim.zero_grad(set_to_none=True)
        self.loss.backward()
        self.optim.step()

    def train(self):
        self.call("before_train")
        self.model.train()
        while self.iter < self.max_iters:
            self.batch = self.next_batch()
            self.call("before_step")
            self.run_step()
            self.call("after_step")
        self.call("after_train")
