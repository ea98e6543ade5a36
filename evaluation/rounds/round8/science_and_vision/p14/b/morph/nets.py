import torch.nn as nn


class MorphNet(nn.Module):
    def __init__(self, classes, width=10):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )
        self.width = 2 * width * 9
        self.head = nn.Linear(self.width, classes)

    def replace_head(self, classes):
        self.head = nn.Linear(self.width, classes)

    def forward(self, x):
        return self.head(self.trunk(x))
