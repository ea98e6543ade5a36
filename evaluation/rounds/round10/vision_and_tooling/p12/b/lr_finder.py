"""Learning-rate range test (exponential ramp, steepest descent of the smoothed loss)."""
import copy
import math

import numpy as np


class LRFinder:
    def __init__(self, net, make_opt, loss_fn, lo=1e-4, hi=3.0, steps=40):
        self.net = copy.deepcopy(net)
        self.opt = make_opt(self.net.parameters(), lo)
        self.loss_fn = loss_fn
        self.lrs = [lo * (hi / lo) ** (i / (steps - 1)) for i in range(steps)]

    def run(self, batches):
        losses = []
        for lr, (x, y) in zip(self.lrs, batches):
            for g in self.opt.param_groups:
                g["lr"] = lr
            loss = self.loss_fn(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            losses.append(min(loss.item(), 50.0) if math.isfinite(loss.item()) else 50.0)
        return self.suggest(losses)

    def suggest(self, losses, smooth=3):
        curve = np.array(losses)
        kernel = np.ones(smooth) / smooth
        curve = np.convolve(curve, kernel, mode="valid")
        stop = int(curve.argmin())
        slope = np.diff(curve[:stop + 1]) if stop else np.zeros(1)
        return self.lrs[int(slope.argmin()) + smooth // 2]
