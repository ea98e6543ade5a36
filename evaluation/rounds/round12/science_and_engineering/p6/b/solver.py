"""Explicit integrator for the Duffing oscillator bank that feeds the surrogate."""
import numpy as np


class Diverged(FloatingPointError):
    pass


def acceleration(x, v, p):
    damping, stiffness, cubic, drive = p
    return drive - damping * v - stiffness * x - cubic * x ** 3


def integrate(state, params, dt, horizon=0.5, limit=20.0):
    """Velocity-Verlet up to `horizon`; raises Diverged when an amplitude leaves the valid range."""
    x, v = state
    steps = int(round(horizon / dt))
    a = acceleration(x, v, params)
    for _ in range(steps):
        x_new = x + v * dt + 0.5 * a * dt * dt
        a_new = acceleration(x_new, v + a * dt, params)
        v = v + 0.5 * (a + a_new) * dt
        x, a = x_new, a_new
        if not np.isfinite(x).all() or np.abs(x).max() > limit:
            raise Diverged(f"amplitude {np.abs(x).max():.3g} with dt={dt}")
    return x, v
