import torch


def residual(net, xt, nu=0.01 / torch.pi):
    """Burgers residual u_t + u u_x - nu u_xx at points (x, t)."""
    xt = xt.detach().requires_grad_(True)
    u = net(xt)
    du, = torch.autograd.grad(u.sum(), xt, create_graph=True)
    u_x, u_t = du[:, 0:1], du[:, 1:2]
    d2u, = torch.autograd.grad(u_x.sum(), xt, create_graph=True)
    return u_t + u * u_x - nu * d2u[:, 0:1]


def boundary_loss(net, n, gen):
    x = torch.rand(n, 1, generator=gen) * 2 - 1
    start = torch.cat([x, torch.zeros(n, 1)], dim=1)
    t = torch.rand(n, 1, generator=gen)
    walls = torch.cat([torch.cat([s * torch.ones(n, 1), t], dim=1) for s in (-1.0, 1.0)])
    return (net(start) + torch.sin(torch.pi * x)).square().mean() + net(walls).square().mean()
