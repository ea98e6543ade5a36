import torch
import torch.nn.functional as F
from torch import nn

STRIDE = 4


class CenterDetector(nn.Module):
    """Centre heat map and box size on a grid of stride 4."""

    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.ReLU())
        self.heat = nn.Conv2d(width, 1, 1)
        self.size = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        h = self.body(x)
        return self.heat(h)[:, 0], self.size(h)


def targets(boxes, hw, full):
    heat = torch.zeros(len(boxes), *hw)
    size = torch.zeros(len(boxes), 2, *hw)
    for b, bb in enumerate(boxes):
        for y0, x0, y1, x1 in bb.tolist():
            gy = min(int((y0 + y1) / 2 / STRIDE), hw[0] - 1)
            gx = min(int((x0 + x1) / 2 / STRIDE), hw[1] - 1)
            heat[b, gy, gx] = 1
            size[b, :, gy, gx] = torch.tensor([(y1 - y0) / full, (x1 - x0) / full])
    return heat, size


def detection_loss(heat, size, boxes, full):
    t_heat, t_size = targets(boxes, heat.shape[1:], full)
    cls = F.binary_cross_entropy_with_logits(heat, t_heat, pos_weight=torch.tensor(8.0))
    reg = ((size - t_size).abs() * t_heat[:, None]).sum() / t_heat.sum().clamp(min=1)
    return cls + reg
