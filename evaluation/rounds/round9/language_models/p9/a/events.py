import torch

NUM_USERS, NUM_ITEMS = 240, 500


class EventLog:
    """Interactions in time order. Items are numbered by the day they were added to the catalogue."""

    def __init__(self, events=2400, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.user = torch.randint(NUM_USERS, (events,), generator=g)
        age = torch.linspace(0.55, 1.25, events).clamp(max=1.0)
        self.item = (torch.rand(events, generator=g) ** 0.4 * age * NUM_ITEMS).long()
        self.label = ((self.user * 7 + self.item * 3) % 5 < 2).float()

    def for_rank(self, rank, world):
        mine = self.user % world == rank
        return self.user[mine], self.item[mine], self.label[mine]


def minibatches(columns, size, count):
    for i in range(count):
        yield [c[i * size:(i + 1) * size] for c in columns]
