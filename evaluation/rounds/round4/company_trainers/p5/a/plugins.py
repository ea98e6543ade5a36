"""Plugins named in the config. A plugin is a class with any of the engine's on_* methods."""
import torch

from model import LoRALinear

REGISTRY = {}


def plugin(name):
    def put(cls):
        REGISTRY[name] = cls
        return cls
    return put


@plugin("lora")
class LoRA:
    def __init__(self, rank, alpha, targets):
        self.rank, self.alpha, self.targets = rank, alpha, targets

    def on_fit_start(self, engine):
        for layer in engine.model.layers:
            for target in self.targets:
                base = getattr(layer, target)
                setattr(layer, target, LoRALinear(base, self.rank, self.alpha))

    def on_export(self, engine, bundle):
        bundle["adapter"] = {
            n: p.detach().clone() for n, p in engine.model.named_parameters()
            if p.requires_grad and n.rsplit(".", 1)[-1] in ("down", "up")
        }


@plugin("loss_ramp")
class LossRamp:
    """Brings the entropy bonus in late, so that it does not fight the warm-up."""

    def __init__(self, over, weight, **where):
        self.start, self.over, self.weight = where["from"], over, weight

    def on_step_start(self, engine):
        t = (engine.step - self.start) / self.over
        engine.entropy_weight = self.weight * min(1.0, max(0.0, t))


@plugin("ema")
class Ema:
    def __init__(self, decay):
        self.decay = decay
        self.average = {}

    def _live(self, engine):
        return ((n, p) for n, p in engine.model.named_parameters() if p.requires_grad)

    def on_fit_start(self, engine):
        self.average = {n: p.detach().clone() for n, p in self._live(engine)}

    @torch.no_grad()
    def on_step_end(self, engine, loss):
        for n, p in self._live(engine):
            self.average[n].lerp_(p, 1 - self.decay)

    def on_export(self, engine, bundle):
        bundle["ema"] = self.average


@plugin("progress")
class Progress:
    def __init__(self, every):
        self.every = every

    def on_fit_start(self, engine):
        live = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in engine.model.parameters())
        engine.say(f"training {live} of {total} parameters")

    def on_step_end(self, engine, loss):
        if engine.step % self.every == 0:
            engine.say(f"step {engine.step} loss {engine.mean(loss):.4f} entropy w {engine.entropy_weight:.3f}",
                       quiet_ranks=True)
