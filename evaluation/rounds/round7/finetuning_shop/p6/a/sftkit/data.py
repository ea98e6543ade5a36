import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Dialogues(Dataset):
    def __init__(self, n=236, vocab=80, length=14, seed=2):
        g = torch.Generator().manual_seed(seed)
        first = torch.randint(0, vocab, (n, 1), generator=g)
        step = torch.randint(1, 5, (n, 1), generator=g)
        self.ids = (first + step * torch.arange(length)) % vocab
        self.prompt_len = torch.randint(3, 7, (n,), generator=g)
        self.vocab = vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: self.prompt_len[i]] = -100
        return self.ids[i], labels


def loaders(recipe, rank, world):
    train, val = Dialogues(), Dialogues(n=40, seed=3)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=17)
    return (DataLoader(train, recipe.micro_batch, sampler=sampler), sampler,
            DataLoader(val, 20, sampler=DistributedSampler(val, world, rank, shuffle=False)))
