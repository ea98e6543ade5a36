"""From the evidence to a small program that does the same."""
