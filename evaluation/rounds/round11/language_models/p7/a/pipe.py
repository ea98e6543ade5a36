"""One-forward-one-backward pipeline engine over point-to-point messages."""
import torch
import torch.distributed as dist

FORWARD, BACKWARD = 0, 1


class Wire:
    """Messages between neighbouring stages; every micro-batch has its own tag."""

    def __init__(self, rank, world, micro_batches):
        self.prev = rank - 1 if rank > 0 else None
        self.next = rank + 1 if rank < world - 1 else None
        self.micro_batches = micro_batches
        self.open = []

    def tag(self, kind, mb):
        return kind * self.micro_batches + mb

    def send(self, x, peer, kind, mb):
        x = x.detach().contiguous()
        self.open.append((dist.isend(x, peer, tag=self.tag(kind, mb)), x))

    def recv(self, shape, peer, kind, mb):
        x = torch.empty(shape)
        dist.recv(x, peer, tag=self.tag(kind, mb))
        return x

    def drain(self):
        for work, _ in self.open:
            work.wait()
        self.open.clear()


class Pipeline:
    def __init__(self, stage, loss_fn, wire, micro_batches, shape):
        self.stage, self.loss_fn, self.wire = stage, loss_fn, wire
        self.micro_batches, self.shape = micro_batches, shape
        self.saved = {}
        self.losses = []

    def forward_step(self, mb, inputs, targets):
        w = self.wire
        if w.prev is None:
            x = inputs[mb]
        else:
            x = w.recv(self.shape, w.prev, FORWARD, mb).requires_grad_()
        y = self.stage(x)
        if w.next is None:
            y = self.loss_fn(y, targets[mb]) / self.micro_batches
            self.losses.append(y.item())
        else:
            w.send(y, w.next, FORWARD, mb)
        self.saved[mb] = (x, y)

    def backward_step(self, mb):
        w = self.wire
        x, y = self.saved.pop(mb)
        if w.next is None:
            y.backward()
        else:
            y.backward(w.recv(self.shape, w.next, BACKWARD, mb))
        if w.prev is not None:
            w.send(x.grad, w.prev, BACKWARD, mb)

    def run(self, rank, world, inputs, targets):
        """Warm-up forwards, then alternating steps, then the remaining backwards."""
        self.losses.clear()
        n = self.micro_batches
        warm = min(world - 1 - rank, n)
        for mb in range(warm):
            self.forward_step(mb, inputs, targets)
        for k in range(n - warm):
            self.forward_step(warm + k, inputs, targets)
            self.backward_step(k)
        for mb in range(n - warm, n):
            self.backward_step(mb)
        self.wire.drain()
        return sum(self.losses)
