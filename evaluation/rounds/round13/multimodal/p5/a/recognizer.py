import torch.nn as nn


class Recognizer(nn.Module):
    def __init__(self, height, classes, hidden=48):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(height, 48, 3, padding=1), nn.ReLU())
        self.rnn = nn.GRU(48, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, image):
        x = self.stem(image.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.out(x).log_softmax(-1)


def greedy(log_probs, width):
    texts = []
    for row, n in zip(log_probs.argmax(-1), width.tolist()):
        ids, previous = [], 0
        for k in row[:n].tolist():
            if k != previous and k != 0:
                ids.append(k)
            previous = k
        texts.append(ids)
    return texts
