from torch import nn


class KwsNet(nn.Module):
    def __init__(self, bins, width, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(bins, width, 3, padding=1), nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1), nn.ReLU())
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.dropout(self.body(x.transpose(1, 2)).mean(-1)))
