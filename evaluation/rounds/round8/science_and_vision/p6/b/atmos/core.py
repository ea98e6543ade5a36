import math

import torch


class Band:
    def __init__(self, nlat, nlon, rank, world):
        rows = nlat // world
        lat = torch.linspace(-1.2, 1.2, nlat)[rank * rows:(rank + 1) * rows]
        lon = torch.arange(nlon) * 2 * math.pi / nlon
        self.lat, self.lon = torch.meshgrid(lat, lon, indexing="ij")

    def initial(self, cycle):
        wave = torch.cos(self.lat) * torch.sin(2 * self.lon + 0.5 * cycle)
        return (wave + 0.3 * torch.sin(3 * self.lat)).unsqueeze(0)


class ShallowWater:
    """Diffusive zonal advection: enough physics for a toy."""

    def __init__(self, dt, wind=0.6, nu=0.1):
        self.dt, self.wind, self.nu = dt, wind, nu

    def tendency(self, padded):
        mid = padded[..., 1:-1, :]
        east, west = mid.roll(-1, -1), mid.roll(1, -1)
        lap = padded[..., 2:, :] + padded[..., :-2, :] + east + west - 4 * mid
        return -self.wind * (east - west) / 2 + self.nu * lap

    def advance(self, state, tendency):
        if tendency.shape[-2] != state.shape[-2]:
            tendency = tendency[..., 1:-1, :]
        return state + self.dt * tendency
