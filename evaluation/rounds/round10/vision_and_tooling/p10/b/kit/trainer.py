import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, net, train_loader, val_loader, lr, epochs, callbacks):
        self.model = DDP(net)
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.opt = torch.optim.Adam(self.model.parameters(), lr)
        self.epochs = epochs
        self.callbacks = callbacks
        self.step = self.epoch = 0
        self.last_loss = 0.0
        self.metrics = {}
        self.should_stop = False

    def fire(self, event):
        for cb in self.callbacks:
            getattr(cb, event)(self)

    def train_epoch(self):
        self.train_loader.sampler.set_epoch(self.epoch)
        for x, y in self.train_loader:
            loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            self.last_loss = loss.item()
            self.fire("on_step_end")

    @torch.no_grad()
    def validate(self):
        t = torch.zeros(2)
        for x, y in self.val_loader:
            t += torch.tensor([F.mse_loss(self.model.module(x), y, reduction="sum").item(), y.numel()])
        dist.all_reduce(t)
        self.metrics["val/loss"] = (t[0] / t[1]).item()

    def fit(self):
        self.fire("on_train_begin")
        for self.epoch in range(self.epochs):
            self.train_epoch()
            self.validate()
            self.fire("on_epoch_end")
            if self.should_stop:
                return self.metrics["val/loss"]
        self.fire("on_train_end")
        return self.metrics["val/loss"]
