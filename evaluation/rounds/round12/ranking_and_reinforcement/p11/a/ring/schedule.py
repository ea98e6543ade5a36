class HopSchedule:
    """How many neighbours give us negatives: few at first, all later on."""

    def __init__(self, world, steps):
        self.world, self.steps = world, steps

    def hops(self, step):
        phase = min(self.world - 2, step * (self.world - 1) // self.steps)
        return range(1, phase + 2)
