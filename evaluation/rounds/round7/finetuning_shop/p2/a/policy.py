import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, prompt, answer):
        """Sum of the answer's log-probabilities given the prompt."""
        x = torch.cat([prompt, answer], 1)
        h, _ = self.rnn(self.emb(x[:, :-1]))
        logp = self.out(h).log_softmax(-1)
        p = prompt.shape[1]
        tok = logp[:, p - 1:].gather(-1, answer.unsqueeze(-1)).squeeze(-1)
        return tok.sum(1)
