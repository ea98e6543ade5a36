import collections
import logging
import pathlib

import torch
import torch.distributed as dist

from .data import SOURCES

log = logging.getLogger("nightjar.callbacks")


class EmaCallback:
    """Exponential moving average of the trainable weights."""

    def __init__(self, decay):
        self.decay = decay
        self.shadow = {}

    def attach(self, hooks):
        hooks.add("fit_start", self.start, priority=10)
        hooks.add("step_end", self.update, priority=10)

    def start(self, trainer, **_):
        self.shadow = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

    @torch.no_grad()
    def update(self, trainer, **_):
        for name, p in trainer.model.named_parameters():
            self.shadow[name].lerp_(p, 1.0 - self.decay)


class MixtureReport:
    """What the run has really been fed, summed over the ranks, per source."""

    def __init__(self, every, group):
        self.every = every
        self.group = group
        self.lengths = collections.defaultdict(list)

    def attach(self, hooks):
        hooks.add("micro_end", self.collect, priority=20)
        hooks.add("step_end", self.report, priority=40)

    def collect(self, trainer, batch, **_):
        for source, length in batch["meta"]:
            self.lengths[source].append(length)

    def _summary(self):
        out = {}
        for source in SOURCES:
            seen = self.lengths[source]
            out[source] = {
                "docs": len(seen),
                "tokens": sum(seen),
                "longest": max(seen),
            }
        return out

    def report(self, trainer, **_):
        if trainer.step % self.every:
            return
        mine = self._summary()
        self.lengths.clear()
        everyone = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        total = sum(r[s]["tokens"] for r in everyone for s in SOURCES)
        for source in SOURCES:
            docs = sum(r[source]["docs"] for r in everyone)
            share = sum(r[source]["tokens"] for r in everyone) / max(total, 1)
            longest = max(r[source]["longest"] for r in everyone)
            log.info("mix step %d %-5s docs %3d share %.2f longest %d",
                     trainer.step, source, docs, share, longest)


class CheckpointRotation:
    def __init__(self, root, every, keep):
        self.root = pathlib.Path(root)
        self.every = every
        self.keep = keep

    def attach(self, hooks):
        hooks.add("step_end", self.maybe_save, priority=60)
        hooks.add("fit_end", self.save, priority=60)

    def maybe_save(self, trainer, **_):
        if trainer.step % self.every == 0:
            self.save(trainer)

    def save(self, trainer, **_):
        if dist.get_rank() != 0:
            return
        path = self.root / f"step{trainer.step:06d}.pt"
        tmp = path.with_suffix(".tmp")
        torch.save({"model": trainer.model.state_dict(), "step": trainer.step}, tmp)
        tmp.rename(path)
        for old in sorted(self.root.glob("step*.pt"))[: -self.keep]:
            old.unlink()


class StepLogger:
    def __init__(self, every):
        self.every = every

    def attach(self, hooks):
        hooks.add("step_end", self.show, priority=90)

    def show(self, trainer, loss, **_):
        if trainer.step % self.every == 0:
            log.info("step %d loss %.4f lr %.5f", trainer.step, loss, trainer.sched.get_last_lr()[0])
