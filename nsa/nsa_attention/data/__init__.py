"""Training data from files, streams or generated text, in an order shared by all ranks."""

from .loader import IGNORED, Batch, Batches
from .source_shards import shipped_text

__all__ = ["IGNORED", "Batch", "Batches", "shipped_text"]
