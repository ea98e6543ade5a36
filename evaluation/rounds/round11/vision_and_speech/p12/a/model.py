import torch.nn as nn


class Classifier(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(width * 4, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def reset_head(self, classes):
        self.head = nn.Linear(self.head.in_features, classes)
        return self
