import torch
import torch.distributed as dist


class Callbacks:
    def __init__(self, *items):
        self.items = items

    def __call__(self, event, **kw):
        for item in self.items:
            fn = getattr(item, event, None)
            if fn:
                fn(**kw)


class GradNorm:
    def __init__(self, model, sink):
        self.model, self.sink = model, sink

    def backward_end(self, step, **kw):
        norm = torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm()
        if self.sink:
            self.sink.log(step=step, name="grad_norm", value=norm.item())


class GlobalLoss:
    """Mean loss over all ranks, uploaded by the first one."""

    def __init__(self, sink):
        self.sink, self.values = sink, []

    def step_end(self, step, loss, **kw):
        self.values.append(loss)
        if self.sink:
            self.sink.log(step=step, name="local_loss", value=loss)

    def epoch_end(self, epoch, step, **kw):
        mean = torch.tensor(sum(self.values) / len(self.values))
        dist.all_reduce(mean)
        self.values.clear()
        if self.sink:
            value = mean.item() / dist.get_world_size()
            self.sink.log(step=step, name="loss", value=value)
            print(f"epoch {epoch} loss {value:.4f}", flush=True)


class FlushAtEpochEnd:
    def __init__(self, sink):
        self.sink = sink

    def epoch_end(self, epoch, **kw):
        if self.sink:
            self.sink.flush()
            print(f"epoch {epoch}: {self.sink.sent} records sent", flush=True)
