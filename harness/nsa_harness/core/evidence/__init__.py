"""What was seen of a run, as values, and how files of others are read into them."""
