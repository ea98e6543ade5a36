"""Several runs: what they say together."""
