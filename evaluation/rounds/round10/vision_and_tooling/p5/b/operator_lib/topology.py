from dataclasses import dataclass


@dataclass
class GridTopology:
    """Row-major rows x cols grid of ranks, closed at its edges."""

    rows: int
    cols: int
    rank: int

    @property
    def row(self):
        return self.rank // self.cols

    @property
    def col(self):
        return self.rank % self.cols

    @property
    def north(self):
        return self.rank - self.cols if self.row > 0 else None

    @property
    def south(self):
        return self.rank + self.cols if self.row + 1 < self.cols else None

    @property
    def west(self):
        return self.rank - 1 if self.col > 0 else None

    @property
    def east(self):
        return self.rank + 1 if self.col + 1 < self.cols else None

    def block(self, n):
        """Slices of this rank's part of an n x n field."""
        h, w = n // self.rows, n // self.cols
        return slice(self.row * h, (self.row + 1) * h), slice(self.col * w, (self.col + 1) * w)
