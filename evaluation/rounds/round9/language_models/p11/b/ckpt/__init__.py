from .gather import full_state
from .writer import AsyncWriter

__all__ = ["AsyncWriter", "full_state"]
