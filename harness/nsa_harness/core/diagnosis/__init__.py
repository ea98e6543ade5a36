"""From a verdict to its cause."""
