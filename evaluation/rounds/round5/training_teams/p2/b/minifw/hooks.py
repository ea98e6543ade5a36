from enum import IntEnum

import torch
import torch.distributed as dist

HOOKS = {}


class Priority(IntEnum):
    VERY_HIGH = 10
    HIGH = 30
    NORMAL = 50
    LOW = 70
    VERY_LOW = 90


def register(cls):
    HOOKS[cls.__name__] = cls
    return cls


class Hook:
    priority = Priority.NORMAL

    def before_train(self, runner):
        pass

    def after_step(self, runner):
        pass

    def after_eval(self, runner):
        pass


@register
class SyncMetricsHook(Hook):
    """Replaces the values measured by this process by the mean over all processes."""

    priority = Priority.HIGH

    def after_eval(self, runner):
        keys = sorted(runner.metrics)
        vec = torch.tensor([runner.metrics[k] for k in keys], dtype=torch.float64)
        dist.all_reduce(vec)
        vec /= dist.get_world_size()
        runner.metrics.update(zip(keys, vec.tolist()))


@register
class PlateauHook(Hook):
    """Multiplies the learning rate by `factor` when `monitor` stands still."""

    def __init__(self, monitor="val_loss", factor=0.3, patience=0, min_lr=1e-5, threshold=0.02):
        self.monitor = monitor
        self.kw = dict(factor=factor, patience=patience, min_lr=min_lr, threshold=threshold)

    def before_train(self, runner):
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(runner.opt, **self.kw)

    def after_eval(self, runner):
        self.sched.step(runner.metrics[self.monitor])


@register
class TextLogHook(Hook):
    priority = Priority.VERY_LOW

    def after_eval(self, runner):
        if runner.rank == 0:
            vals = " ".join(f"{k}={v:.4f}" for k, v in sorted(runner.metrics.items()))
            print(f"[{runner.step:4d}] lr={runner.opt.param_groups[0]['lr']:.2e} {vals}", flush=True)


def build_hooks(specs):
    hooks = []
    for spec in specs:
        spec = dict(spec)
        cls = HOOKS[spec.pop("type")]
        prio = spec.pop("priority", None)
        hook = cls(**spec)
        if prio is not None:
            hook.priority = Priority[prio]
        hooks.append(hook)
    return sorted(hooks, key=lambda h: h.priority)
