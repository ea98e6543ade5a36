import torch
import torch.distributed as dist
import torch.nn.functional as F


class GPipe:
    """All micro-batches forward, then all of them backward; sizes travel ahead of activations."""

    def __init__(self, module, optimizer, cfg):
        self.module = module
        self.opt = optimizer
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.last = dist.get_world_size() - 1

    def _recv_activation(self):
        n = torch.empty(1, dtype=torch.long)
        dist.recv(n, src=self.rank - 1)
        act = torch.empty(int(n), self.cfg["hidden"])
        dist.recv(act, src=self.rank - 1)
        return act.requires_grad_(True)

    def _send_activation(self, out):
        dist.send(torch.tensor([out.shape[0]]), dst=self.rank + 1)
        dist.send(out.detach().contiguous(), dst=self.rank + 1)

    def step(self, x_chunks, y_chunks, micro):
        saved, losses = [], []
        for m in range(micro):
            inp = x_chunks[m] if self.rank == 0 else self._recv_activation()
            out = self.module(inp)
            if self.rank == self.last:
                out = F.cross_entropy(out, y_chunks[m]) / micro
                losses.append(out.item())
            else:
                self._send_activation(out)
            saved.append((inp, out))
        self.opt.zero_grad()
        for inp, out in saved:
            if self.rank == self.last:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, src=self.rank + 1)
                out.backward(grad)
            if self.rank > 0:
                dist.send(inp.grad, dst=self.rank - 1)
        self.opt.step()
        return sum(losses)
