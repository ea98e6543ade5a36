import time


class Meter:
    def __init__(self):
        self.start, self.rows, self.losses = time.perf_counter(), 0, []

    def add(self, rows, loss):
        self.rows += rows
        self.losses.append(loss)

    def text(self):
        tail = self.losses[-10:]
        return f"loss {sum(tail) / len(tail):.4f}, {self.rows} rows"
