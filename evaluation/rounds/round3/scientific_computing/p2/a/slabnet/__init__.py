from .halo import exchange, Slab
from .net import IceNet
from .data import Ocean

__all__ = ["exchange", "Slab", "IceNet", "Ocean"]
