import copy

import torch
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def logits(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])

    def sequence_logprob(self, ids, mask):
        """Sum of the log-probabilities of the answer tokens of each sequence."""
        logp = self.logits(ids[:, :-1]).log_softmax(-1)
        token = logp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (token * mask[:, 1:]).sum(1)

    def forward(self, ids, mask):
        return self.sequence_logprob(ids, mask)


def frozen_copy(model):
    ref = copy.deepcopy(model).eval()
    return ref.requires_grad_(False)


def concatenated(batch):
    """Chosen and rejected in one batch, so that a step needs only one forward."""
    ids = torch.cat([batch["chosen"], batch["rejected"]])
    return ids, torch.cat([batch["mask"], batch["mask"]])
