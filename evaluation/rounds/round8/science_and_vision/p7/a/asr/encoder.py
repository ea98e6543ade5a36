import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, feats, hidden, classes):
        super().__init__()
        self.conv = nn.Conv1d(feats, hidden, 5, padding=2)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        h = self.conv(x.transpose(1, 2)).relu().transpose(1, 2)
        return self.out(self.rnn(h)[0])
