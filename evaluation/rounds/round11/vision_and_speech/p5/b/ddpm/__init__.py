from .net import Denoiser
from .schedule import Cosine

__all__ = ["Denoiser", "Cosine"]
