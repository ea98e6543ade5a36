from dist_utils import mean_of


class DiscriminatorGate:
    """Lets the discriminator rest for some steps while it is far ahead of the generator."""

    def __init__(self, ceiling, rest, smooth=0.4):
        self.ceiling = ceiling
        self.rest = rest
        self.smooth = smooth
        self.accuracy = 0.5
        self.resting = 0

    def observe(self, on_real, on_fake):
        hits = (on_real > 0).float().mean() + (on_fake < 0).float().mean()
        now, = mean_of([hits.item() / 2])
        self.accuracy = self.smooth * self.accuracy + (1 - self.smooth) * now
        if self.accuracy > self.ceiling:
            self.resting = self.rest
            self.accuracy = 0.5

    def open(self):
        if self.resting:
            self.resting -= 1
            return False
        return True
