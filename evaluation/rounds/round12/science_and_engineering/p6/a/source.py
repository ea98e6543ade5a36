import numpy as np
import torch

from solver import Diverged, integrate


class OscillatorSource:
    """Draws initial states and parameters, runs the solver, hands out training pairs."""

    def __init__(self, seed, batch, dt=0.05):
        self.rng = np.random.default_rng(seed)
        self.batch = batch
        self.dt = dt

    def draw(self):
        n, r = self.batch, self.rng
        state = r.normal(0, 1.0, (2, n))
        damping = r.uniform(0.1, 0.5, n)
        stiffness = r.uniform(0.5, 2.0, n)
        cubic = r.lognormal(0.6, 1.5, n)
        drive = r.normal(0, 0.3, n)
        return state, np.stack([damping, stiffness, cubic, drive])

    def simulate(self, state, params, dt=None):
        x, v = integrate(state, params, dt or self.dt)
        inputs = np.concatenate([state, np.log1p(np.abs(params))]).T
        target = np.stack([x, v]).T
        return torch.from_numpy(inputs).float(), torch.from_numpy(target).float()

    def safe_dt(self, state, params):
        """Largest halving of dt with which the batch integrates."""
        dt = self.dt
        for _ in range(12):
            dt /= 2
            try:
                integrate(state, params, dt)
                return dt
            except Diverged:
                continue
        raise Diverged("no stable step size")
