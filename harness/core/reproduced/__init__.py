"""From the evidence of a run to a small program that does the same."""
