import torch
import torch.nn.functional as F
from torch import nn

from sharded import ShardedParameter


class ShardedPolicy(nn.Module):
    """Next-token model over a window of the last tokens; matrices sharded, embedding and head tied."""

    def __init__(self, vocab, hidden, window, generator):
        super().__init__()
        self.window = window
        rnd = lambda *s: torch.randn(*s, generator=generator)
        self.embed = ShardedParameter(rnd(vocab, hidden) * 0.3)
        self.mix = ShardedParameter(rnd(hidden, window * hidden) / (window * hidden) ** 0.5)

    def forward(self, ids):
        """ids [B, T] -> logits of the token after each position t >= window-1."""
        table = self.embed()
        emb = F.embedding(ids, table)
        win = emb.unfold(1, self.window, 1).permute(0, 1, 3, 2).flatten(2)
        return F.linear(torch.tanh(F.linear(win, self.mix())), table)
