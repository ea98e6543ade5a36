"""nsa-harness: runs training scenarios under torchrun, watches them, and says what happened."""

__version__ = "0.1.0"
