import torch
import torch.nn.functional as F


class Runner:
    def __init__(self, model, opt, hooks, rank, eval_interval):
        self.model, self.opt, self.hooks = model, opt, hooks
        self.rank, self.eval_interval = rank, eval_interval
        self.metrics, self.step = {}, 0

    def call(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        loss, hit, n = 0.0, 0, 0
        for ids in batches:
            out = self.model.module(ids[:, :-1])
            tgt = ids[:, 1:].reshape(-1)
            out = out.reshape(len(tgt), -1)
            loss += F.cross_entropy(out, tgt).item()
            hit += (out.argmax(-1) == tgt).sum().item()
            n += len(tgt)
        self.metrics = {"val_loss": loss / len(batches), "val_acc": hit / n}
        self.model.train()

    def fit(self, train_batches, val_batches, max_steps):
        self.call("before_train")
        while self.step < max_steps:
            ids = train_batches[self.step % len(train_batches)]
            out = self.model(ids[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].reshape(-1))
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            self.step += 1
            self.call("after_step")
            if self.step % self.eval_interval == 0:
                self.evaluate(val_batches)
                self.call("after_eval")
