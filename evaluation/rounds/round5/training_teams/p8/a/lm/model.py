import torch.nn as nn


class CharLM(nn.Module):
    def __init__(self, vocab=10, width=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])
