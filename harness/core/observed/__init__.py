"""What was seen of a run, as values, and the parsers that make them."""
