"""Prompt/response groups; a group is usable when enough response tokens survive truncation."""
import itertools

import torch

VOCAB, LENGTH, GROUP = 64, 14, 6


class Responses:
    def __init__(self, groups, rank, world, seed=19):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(1, VOCAB, (groups, GROUP, 1), generator=g)
        self.ids = (start + 2 * torch.arange(LENGTH)) % VOCAB
        self.prompt_len = torch.randint(2, 8, (groups, GROUP), generator=g)
        long_prompts = torch.arange(groups) % 6 == 1
        self.prompt_len[long_prompts] = LENGTH - 1
        self.mine = list(range(groups))[rank::world]

    def order(self):
        return itertools.cycle(self.mine)

    def fill(self, buf, k):
        ids, labels = buf
        ids.copy_(self.ids[k])
        labels.copy_(self.ids[k])
        cut = torch.arange(LENGTH).unsqueeze(0) < self.prompt_len[k].unsqueeze(1)
        labels.masked_fill_(cut, -100)
        return int((labels != -100).sum()) >= 2 * GROUP

    @staticmethod
    def buffer():
        shape = (GROUP, LENGTH)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
