import torch
import torch.nn as nn
import torch.nn.functional as F

from .parallel import CopyToShards, GatherChannels


class ShardedSpectral(nn.Module):
    """Spectral and pointwise mixing; each rank owns a slice of the outputs."""

    def __init__(self, width, modes, layout):
        super().__init__()
        self.layout, self.modes = layout, modes
        lo = layout.tp_rank * width // layout.tp
        hi = lo + width // layout.tp
        full = torch.randn(width, width, modes, 2) / width
        self.weight = nn.Parameter(full[:, lo:hi].clone())
        mix = torch.randn(width, width) / width ** 0.5
        self.mix = nn.Parameter(mix[lo:hi].clone())

    def forward(self, x):
        x = CopyToShards.apply(x, self.layout)
        spec = torch.fft.rfft(x)
        low = torch.einsum("bim,iom->bom", spec[..., :self.modes], torch.view_as_complex(self.weight))
        pad = F.pad(torch.view_as_real(low), (0, 0, 0, spec.shape[-1] - self.modes))
        y = torch.fft.irfft(torch.view_as_complex(pad.contiguous()), n=x.shape[-1])
        y = y + torch.einsum("bin,oi->bon", x, self.mix)
        return GatherChannels.apply(y, self.layout)


class Operator(nn.Module):
    def __init__(self, width, modes, depth, layout):
        super().__init__()
        self.lift = nn.Conv1d(2, width, 1)
        self.layers = nn.ModuleList(ShardedSpectral(width, modes, layout) for _ in range(depth))
        self.project = nn.Conv1d(width, 1, 1)

    def forward(self, u):
        grid = torch.linspace(0, 1, u.shape[-1]).expand_as(u)
        h = self.lift(torch.cat([u, grid], 1))
        for layer in self.layers:
            h = F.gelu(layer(h))
        return self.project(h)
