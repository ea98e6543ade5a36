"""Training data from files, streams or generated text, in an order shared by all ranks."""

try:
    import numpy as _  # noqa: F401
except ImportError as error:
    raise ImportError("training needs NumPy: pip install numpy") from error

from .loader import IGNORED, Batch, Batches
from .source_shards import shipped_text

__all__ = ["IGNORED", "Batch", "Batches", "shipped_text"]
