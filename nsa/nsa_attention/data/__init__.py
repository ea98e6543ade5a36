"""Data: from files, streams and generators of text to batches of tokens, in one order for all ranks."""

from .loader import IGNORED, Batch, Batches
from .named import shipped_text

__all__ = ["IGNORED", "Batch", "Batches", "shipped_text"]
