import torch

BOS, EOS, PAD = 1, 2, 0
FIRST = 3


class CharTokenizer:
    def __init__(self, alphabet, max_len):
        self.index = {c: i + FIRST for i, c in enumerate(alphabet)}
        self.max_len = max_len
        self.size = FIRST + len(alphabet)

    def encode(self, text):
        body = [self.index[c] for c in text[: self.max_len - 2]]
        return torch.tensor([BOS] + body + [EOS])
