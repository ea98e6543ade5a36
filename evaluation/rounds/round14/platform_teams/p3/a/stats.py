import numpy as np


class Window:
    """Ring buffer over the last `size` observations of one scalar."""

    def __init__(self, size):
        self.buf = np.zeros(size, dtype=np.float32)
        self.seen = 0

    def push(self, value):
        self.buf[self.seen % len(self.buf)] = value
        self.seen += 1

    @property
    def full(self):
        return self.seen >= len(self.buf)

    def _view(self):
        return self.buf if self.full else self.buf[: self.seen]

    def mean(self):
        return float(self._view().mean())

    def spread(self):
        view = self._view()
        return float(view.max() - view.min())
