import torch
import torch.nn as nn


def encoder_out_lens(lens):
    return (lens - 1) // 2


class TinyEncoder(nn.Module):
    """Conv subsampling followed by a GRU and a CTC projection."""

    def __init__(self, num_features, dim, vocab_size):
        super().__init__()
        self.subsample = nn.Conv1d(num_features, dim, kernel_size=3, stride=2)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.ctc = nn.Linear(dim, vocab_size)

    def forward(self, x, x_lens):
        x = torch.relu(self.subsample(x.transpose(1, 2))).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.ctc(self.norm(x)).log_softmax(-1), encoder_out_lens(x_lens)
