"""Gradient averaging over all ranks, overlapped with the backward pass."""
import torch
import torch.distributed as dist


class GradientSync:
    def __init__(self, module):
        self.world = dist.get_world_size()
        self.pending = []
        self.handles = []
        with torch.no_grad():
            for tensor in list(module.parameters()) + list(module.buffers()):
                dist.broadcast(tensor, src=0)
        for p in module.parameters():
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(self._launch))

    def _launch(self, p):
        self.pending.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish(self):
        for work, p in self.pending:
            work.wait()
            p.grad.div_(self.world)
        self.pending.clear()
