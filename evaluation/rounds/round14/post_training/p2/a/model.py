import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)
        with torch.no_grad():
            self.out.bias[1] = 1.0

    def step(self, token, state):
        h, state = self.rnn(self.emb(token), state)
        return self.out(h[:, -1]), state

    def forward(self, ids):
        shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        h, _ = self.rnn(self.emb(shifted))
        logp = self.out(h).log_softmax(-1)
        chosen = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return chosen, entropy


class RewardModel(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, ids):
        return self.head(self.emb(ids)).squeeze(-1)
