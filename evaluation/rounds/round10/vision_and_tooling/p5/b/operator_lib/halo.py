import torch
import torch.distributed as dist

TAGS = {"north": 1, "south": 2, "west": 3, "east": 4}
OPPOSITE = {"north": "south", "south": "north", "west": "east", "east": "west"}


def swap(topo, strips):
    """Sends strips[side] to the neighbour on that side; returns what each neighbour sent."""
    pending, received = [], {}
    for side, strip in strips.items():
        peer = getattr(topo, side)
        if peer is None:
            continue
        strip = strip.contiguous()
        buf = torch.empty_like(strip)
        pending.append(dist.isend(strip, peer, tag=TAGS[side]))
        pending.append(dist.irecv(buf, peer, tag=TAGS[OPPOSITE[side]]))
        received[side] = buf
    for req in pending:
        req.wait()
    return received


def edge(x, side, w):
    return {"north": x[:, :, :w], "south": x[:, :, -w:],
            "west": x[:, :, :, :w], "east": x[:, :, :, -w:]}[side]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topo, w, axis):
        ctx.topo, ctx.w, ctx.axis = topo, w, axis
        sides = ("north", "south") if axis == 2 else ("west", "east")
        ctx.sides = sides
        got = swap(topo, {s: edge(x, s, w) for s in sides})
        lo, hi = (got.get(s, torch.zeros_like(edge(x, s, w))) for s in sides)
        return torch.cat([lo, x, hi], axis)

    @staticmethod
    def backward(ctx, grad):
        w, axis = ctx.w, ctx.axis
        inner = grad.narrow(axis, w, grad.shape[axis] - 2 * w).clone()
        got = swap(ctx.topo, {s: edge(grad, s, w) for s in ctx.sides})
        for s, g in got.items():
            edge(inner, s, w).add_(g)
        return inner, None, None, None


class Exchanger:
    def __init__(self, topo, width):
        self.topo = topo
        self.width = width

    def __call__(self, x):
        x = _Exchange.apply(x, self.topo, self.width, 2)
        return _Exchange.apply(x, self.topo, self.width, 3)
