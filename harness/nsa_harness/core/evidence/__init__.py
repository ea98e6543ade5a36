"""Evidence of a run as values, and the parsers of files that others wrote."""
