import os

import numpy as np
import torch
import torch.distributed as dist

from .metrics import ConfusionMatrix


class Hook:
    trainer = None

    def before_train(self):
        pass

    def before_step(self):
        pass

    def after_step(self):
        pass

    def after_train(self):
        pass

    def every_n(self, n):
        return self.trainer.iter % n == 0


class PolyLRHook(Hook):
    def __init__(self, power):
        self.power = power

    def before_step(self):
        t = self.trainer
        scale = max(1 - (t.iter - 1) / t.max_iters, 0.0) ** self.power
        for g in t.optim.param_groups:
            g["lr"] = t.base_lr * scale


class LogHook(Hook):
    def __init__(self, every):
        self.every = every

    def after_step(self):
        t = self.trainer
        if self.every_n(self.every):
            print(f"epoch {t.epoch} iter {t.iter:4d} loss {t.loss.item():.4f} "
                  f"lr {t.optim.param_groups[0]['lr']:.4f}", flush=True)


class PreviewHook(Hook):
    """Writes input / prediction / mask strips now and then."""

    def __init__(self, every, out_dir):
        self.every = every
        self.out_dir = out_dir

    def before_train(self):
        os.makedirs(self.out_dir, exist_ok=True)

    @torch.no_grad()
    def after_step(self):
        t = self.trainer
        if not self.every_n(self.every):
            return
        name = f"iter_{t.iter:05d}.npz"
        images, masks = t.next_batch()
        pred = t.model.module(images).argmax(1)
        np.savez(os.path.join(self.out_dir, name),
                 image=images[0].numpy(), mask=masks[0].numpy(), pred=pred[0].numpy())


class EvalHook(Hook):
    def __init__(self, loader, classes, every):
        self.loader = loader
        self.classes = classes
        self.every = every

    @torch.no_grad()
    def evaluate(self):
        net = self.trainer.model.module
        net.eval()
        cm = ConfusionMatrix(self.classes)
        for images, masks in self.loader:
            cm.update(net(images).argmax(1), masks)
        net.train()
        return cm.compute()

    def after_step(self):
        t = self.trainer
        if self.every_n(self.every):
            miou = self.evaluate()
            t.state["best_miou"] = max(miou, t.state.get("best_miou", 0.0))
            if dist.get_rank() == 0:
                print(f"iter {t.iter} mIoU {miou:.3f}", flush=True)
