import torch.nn as nn


class GridDetector(nn.Module):
    """Predicts objectness and four offsets for each cell of a coarse grid."""

    def __init__(self, size, cells, width=12):
        super().__init__()
        layers, ch, res = [], 1, size
        while res > cells:
            layers += [nn.Conv2d(ch, width, 3, stride=2, padding=1), nn.GroupNorm(3, width), nn.ReLU()]
            ch, res = width, res // 2
        self.body = nn.Sequential(*layers)
        self.out = nn.Conv2d(width, 5, 1)
        self.size = size

    def forward(self, x):
        return self.out(self.body(x))
