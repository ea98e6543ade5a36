import torch

CUSTOMERS = [("harbor", 96), ("quarry", 160)]
DIM, CLASSES = 20, 6


def customer_of(rank, per_lane):
    return rank // per_lane


def samples(customer, position, per_lane):
    name, n = CUSTOMERS[customer]
    g = torch.Generator().manual_seed(50 + customer)
    centers = torch.randn(CLASSES, DIM, generator=g)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = centers[y] + 0.7 * torch.randn(n, DIM, generator=g)
    return name, x[position::per_lane], y[position::per_lane]
