"""Viscous Burgers on a ring, cut into one piece per rank; a travelling front sits in one of them."""
import torch


def initial(points, case):
    x = torch.linspace(0, 1, points + 1)[:-1]
    front = torch.tanh((x - 0.55) / 0.03) - torch.tanh((x - 0.9) / 0.03) - 1
    waves = 0.1 * torch.sin(2 * torch.pi * (x + 0.13 * case))
    return 0.4 * front * (1 + 0.05 * case) + waves


def advance(u, dt=0.1, nu=0.15, substeps=3):
    for _ in range(substeps):
        left, right = u.roll(1), u.roll(-1)
        u = u - dt * u * (right - left) / 2 + nu * (left - 2 * u + right)
    return u


def trajectory(points, case, length):
    states = [initial(points, case)]
    for _ in range(length):
        states.append(advance(states[-1]))
    return torch.stack(states)
