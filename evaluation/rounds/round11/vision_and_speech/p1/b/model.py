import torch
import torch.nn as nn
import torch.nn.functional as F


class CenterDetector(nn.Module):
    def __init__(self, num_classes, width=12):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.GroupNorm(2, width), nn.SiLU(),
            nn.Conv2d(width, width * 2, 3, stride=2, padding=1), nn.GroupNorm(2, width * 2), nn.SiLU(),
        )
        self.heat = nn.Conv2d(width * 2, num_classes, 1)
        self.size = nn.Conv2d(width * 2, 2, 1)
        nn.init.constant_(self.heat.bias, -2.0)

    def forward(self, x):
        f = self.stem(x)
        return self.heat(f), self.size(f)


def detection_loss(pred_heat, pred_wh, heat, wh):
    p = torch.sigmoid(pred_heat)
    pos = heat.eq(1).float()
    focal = -(pos * (1 - p) ** 2 * F.logsigmoid(pred_heat)
              + (1 - pos) * p ** 2 * F.logsigmoid(-pred_heat)).sum()
    mask = pos.amax(dim=1, keepdim=True)
    reg = (mask * (pred_wh - wh).abs()).sum()
    return (focal + 2.0 * reg) / pos.sum().clamp(min=1)
