import torch


class Mixture:
    """Draws the task of each step in proportion to its current weight."""

    def __init__(self, names, seed, temperature=1.0):
        self.names = sorted(names)
        self.gen = torch.Generator().manual_seed(seed)
        self.temperature = temperature
        self.weights = {n: 1.0 / len(self.names) for n in self.names}

    def draw(self):
        w = torch.tensor([self.weights[n] for n in self.names])
        return self.names[torch.multinomial(w, 1, generator=self.gen).item()]

    def reweight(self, losses):
        w = torch.tensor([losses[n] for n in self.names]) ** (1.0 / self.temperature)
        w = w / w.sum()
        self.weights = dict(zip(self.names, w.tolist()))

    def state_dict(self):
        return {"weights": self.weights, "rng": self.gen.get_state()}
