import torch
import torch.distributed as dist
import torch.nn.functional as F


class SpikeGuard:
    """Rejects micro-batches whose loss is far above the running level."""

    def __init__(self, factor=6.0, decay=0.9):
        self.factor = factor
        self.decay = decay
        self.level = None
        self.rejected = 0

    def accepts(self, loss):
        if self.level is not None and loss > self.factor * self.level:
            self.rejected += 1
            return False
        self.level = loss if self.level is None else self.decay * self.level + (1 - self.decay) * loss
        return True


class PipelineEngine:
    """All forwards, then all backwards, in micro-batch order."""

    def __init__(self, module, link, optimizer, micro, guard):
        self.module = module
        self.link = link
        self.opt = optimizer
        self.micro = micro
        self.guard = guard

    def _forward(self, x):
        source = x if self.link.prev is None else self.link.take_activation()
        out = self.module(source)
        if self.link.next is not None:
            self.link.give_activation(out)
        return source, out

    def _backward_inner(self, source, out):
        out.backward(self.link.take_gradient())
        if self.link.prev is not None:
            self.link.give_gradient(source.grad)

    def _backward_last(self, source, out, goal):
        loss = F.smooth_l1_loss(out, goal)
        if not self.guard.accepts(loss.item()):
            self.link.give_gradient(torch.zeros_like(source))
            return 0.0
        (loss / self.micro).backward()
        self.link.give_gradient(source.grad)
        return loss.item()

    def _clip(self, limit=5.0):
        square = sum(p.grad.square().sum() for p in self.module.parameters() if p.grad is not None)
        square = torch.as_tensor(square, dtype=torch.float32).reshape(1)
        dist.all_reduce(square)
        norm = square.sqrt().item()
        if norm > limit:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.mul_(limit / norm)
        return norm

    def train_batch(self, obs, goal):
        self.opt.zero_grad()
        tape = [self._forward(x) for x in obs.chunk(self.micro)]
        total = 0.0
        for (source, out), target in zip(tape, goal.chunk(self.micro)):
            if self.link.next is None:
                total += self._backward_last(source, out, target)
            else:
                self._backward_inner(source, out)
        norm = self._clip()
        self.opt.step()
        return total / self.micro, norm
