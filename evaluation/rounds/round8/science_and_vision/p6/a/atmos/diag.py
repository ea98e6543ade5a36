"""What the forecaster on shift sees."""


class Diagnostics:
    def __init__(self, rank, every):
        self.rank, self.every = rank, every
        self.lines = 0

    def lead(self, cycle, lead, state, halo):
        if self.rank != 0 or (lead + 1) % self.every:
            return
        self.lines += 1
        print(f"cycle {cycle} lead {lead + 1} mean {state.mean():+.4f} "
              f"max {state.abs().max():.3f} exchange #{halo.sequence}", flush=True)

    def cycle(self, cycle, total):
        if self.rank == 0:
            print(f"cycle {cycle} loss {total:.5f}", flush=True)
