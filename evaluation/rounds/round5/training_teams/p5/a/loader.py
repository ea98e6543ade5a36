import torch


class StatefulLoader:
    """Epoch loader over this rank's part that can go on in the middle of an epoch."""

    def __init__(self, data, batch_size, rank, world, seed=0):
        self.data, self.batch_size = data, batch_size
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch, self.cursor = 0, 0

    def _order(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        idx = torch.randperm(len(self.data[0]), generator=g)
        usable = len(idx) - len(idx) % (self.world * self.batch_size)
        return idx[:usable][self.rank::self.world].split(self.batch_size)

    def __iter__(self):
        order = self._order()
        while self.cursor < len(order):
            idx = order[self.cursor]
            self.cursor += 1
            yield tuple(t[idx] for t in self.data)
        self.epoch, self.cursor = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state):
        self.epoch, self.cursor = state["epoch"], state["cursor"]
