"""Several runs together."""
